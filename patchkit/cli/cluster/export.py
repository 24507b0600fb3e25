"""Write files for other systems, an image's or a cluster's: `patchkit export`."""

from __future__ import annotations

from pathlib import Path

import click

from patchkit.cli.cluster.cluster_options import OTHER_FILE_OPTION, cluster_here
from patchkit.cli.out import LaidOut, tell
from patchkit.cli.render import (
    Blocks,
    Data,
    VerbGroup,
    flag,
    house_option,
    note,
    option,
    rendered,
)
from patchkit.cli.runtime.node_options import LOCK, ROOT, VLLM, note_lines
from patchkit.cluster.launch.cluster import read_cluster_file
from patchkit.cluster.launch.kubernetes import kubernetes_manifest, plan_pods
from patchkit.errors import UsageError
from patchkit.quoting import quoted
from patchkit.runtime.envfile.env_file import NODES_MAX, locked_versions
from patchkit.runtime.host.probe import probe
from patchkit.runtime.rules.secret_texts import secret_spans
from patchkit.runtime.rules.variable_rules import cache_variables
from patchkit.wheel.wheelhouse.containerfile import (
    CACHE_HOME,
    build_commands,
    check_image,
    containerfile,
)
from patchkit.wheel.wheelhouse.contents import load_manifest


@click.group(cls=VerbGroup)
def export_command() -> None:
    """Write files for other systems: an image's, or a cluster's."""


@export_command.command("containerfile")
@option(
    "--base IMAGE@sha256:…",
    "Ubuntu or Debian that has the wheelhouse's Python.",
    required=True,
)
@flag("--unpinned", "Accept a base without a digest.")
@house_option
@rendered
def write_containerfile(base: str, unpinned: bool, house: Path) -> Blocks:
    """Write the Containerfile of an image with the wheelhouse, for docker, podman and buildah.

    \b
      patchkit export containerfile --base ubuntu:24.04@sha256:… > Containerfile
    """
    check_image(base, pinned=not unpinned)
    manifest = load_manifest(house)
    vllm = manifest.version_of("vllm")
    caches = cache_variables(CACHE_HOME, vllm) if vllm else {}
    made = containerfile(manifest, base, house.as_posix(), caches)
    builds = build_commands(made.platform)
    yield {
        "containerfile": made.text,
        "platform": made.platform,
        "build": builds,
    }
    yield Data(made.text)

    tell("build it with one of these, and name it in cluster.toml: `image` in [serve]")
    for words in builds:
        tell(LaidOut(f"  {quoted(*words)}"))


@export_command.command("kubernetes")
@click.argument("model")
@option("--image NAME@sha256:…", "Image that has vLLM.", required=True)
@option(
    "--nodes N",
    "Nodes of a group; default: 1.",
    type=click.IntRange(1, NODES_MAX),
    default=1,
)
@option(
    "--groups M",
    "Groups that serve the model; default: 1.",
    type=click.IntRange(1),
    default=1,
)
@ROOT
@LOCK
@VLLM
@OTHER_FILE_OPTION
@rendered
def write_kubernetes(
    model: str,
    image: str,
    nodes: int,
    groups: int,
    root: Path,
    lock: Path | None,
    vllm: str,
    file: Path | None,
) -> Blocks:
    """Write a LeaderWorkerSet that serves a model as `patchkit up` would, by pods.

    \b
      patchkit export kubernetes openai/gpt-oss-120b --root head.probe \\
        --nodes 2 --groups 4 --lock wheelhouse --image NAME@sha256:… > vllm.yaml

    Interfaces and devices are those of the machine at --root: the nodes have to be cabled alike.
    --file names a cluster.toml for its [serve], [models] and `name`; of its nodes only the head's
    `address` counts.
    """
    check_image(image, pinned=False)
    versions = dict(locked_versions(lock)) if lock else {}
    if vllm:
        versions["vllm"] = vllm
    if "vllm" not in versions:
        raise UsageError(
            "nothing says which vLLM the image has",
            hint="--lock WHEELHOUSE, or --vllm 0.33.0",
        )

    cluster = read_cluster_file(file) if file else cluster_here()
    host = probe(root)
    units = plan_pods(cluster.with_image(image), host, model, nodes, **versions)
    manifest = kubernetes_manifest(units, groups)
    if secret_spans(manifest):
        raise UsageError(
            "a secret would be in the manifest",
            hint="take it out of cluster.toml: the Secret's keys become variables, too",
        )

    yield {"manifest": manifest}
    yield Data(manifest)

    if "@" not in image:
        tell(note(f"{image}: a tag can be moved between two starts; name its digest"))
    head = units.ranks[0]
    assert head.command
    for line in note_lines(head.env.notes, head.env.advice + head.command.advice):
        tell(line)
