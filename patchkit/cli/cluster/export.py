"""Write files for other systems, an image's or a cluster's: `patchkit export`."""

from __future__ import annotations

import re
from pathlib import Path

import click

from patchkit.cli.cluster.cluster_options import OTHER_FILE_OPTION, cluster_here
from patchkit.cli.out import LaidOut, tell
from patchkit.cli.render import (
    Blocks,
    Data,
    VerbGroup,
    note,
    option,
    rendered,
)
from patchkit.cli.runtime.node_options import LOCK, ROOT, VLLM, note_lines
from patchkit.cluster.launch.cluster import read_cluster_file
from patchkit.cluster.launch.kubernetes import kubernetes_manifest, plan_pods
from patchkit.errors import UsageError
from patchkit.reading import read_text
from patchkit.records import RECIPES
from patchkit.runtime.envfile.env_file import NODES_MAX, locked_versions
from patchkit.runtime.host.probe import probe
from patchkit.runtime.rules.secret_texts import secret_spans

# Characters of a reference, none of which ends a line or a word of a manifest.
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,500}")


@click.group(cls=VerbGroup)
def export_command() -> None:
    """Write files for other systems: an image's, or a cluster's."""


@export_command.command("containerfile")
@rendered
def write_containerfile() -> Blocks:
    """Write the Containerfile of an image with the wheelhouse, for docker, podman and buildah.

    \b
      patchkit export containerfile > Containerfile
    """
    text = read_text(RECIPES / "export" / "Containerfile")
    yield {"containerfile": text}
    yield Data(text)

    build = "build --file Containerfile --tag vllm-wheelhouse --build-arg BASE=IMAGE@sha256:…"
    tell(LaidOut(f"build it: docker {build} ."))
    tell("and name it in cluster.toml: `image` in [serve]")


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
    if not _IMAGE.fullmatch(image):
        raise UsageError(f"{image!r} is not the name of an image")

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
