"""Write files for other systems, an image's or a cluster's: `patchkit export`."""

import re
from pathlib import Path

import click

from patchkit.cli.cluster.cluster_options import cluster_option
from patchkit.cli.out import LaidOut, tell
from patchkit.cli.render import Blocks, Data, VerbGroup, options_of, rendered
from patchkit.cli.runtime.node_options import note_lines
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.cluster_file import IMAGE
from patchkit.cluster.launch.kubernetes import kubernetes_manifest, plan_pods
from patchkit.errors import UsageError
from patchkit.reading import read_text
from patchkit.records import RECIPES
from patchkit.runtime.envfile.env_file import locked_versions
from patchkit.runtime.host.probe import probe
from patchkit.runtime.rules.secret_texts import secret_spans


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
    text = read_text(RECIPES / "export/Containerfile")
    yield {"containerfile": text}
    yield Data(text)

    build = "build --file Containerfile --tag vllm-wheelhouse --build-arg BASE=IMAGE@sha256:…"
    tell(LaidOut(f"build it: docker {build} ."))
    tell("and name it in cluster.toml: `image` in [serve]")


@export_command.command("kubernetes")
@cluster_option
@options_of("export-kubernetes")
@rendered
def write_kubernetes(
    model: str,
    cluster: Cluster,
    image: str,
    nodes: int,
    groups: int,
    root: Path,
    lock: Path | None,
    vllm: str,
) -> Blocks:
    """Write a LeaderWorkerSet: pods that serve a model as `patchkit up` would.

    \b
      patchkit export kubernetes openai/gpt-oss-120b --root head.probe \\
        --nodes 2 --groups 4 --lock wheelhouse --image NAME@sha256:… > vllm.yaml

    Interfaces and devices are those of the machine at --root: the nodes have to be cabled alike.
    If the model is a folder, run this where the folder is: its files decide how much memory the
    cache gets. The cluster file gives [serve], [models] and `name`; of its nodes only the head's
    `address` counts. --here leaves it out.
    """
    if not re.fullmatch(f"(?=.*@)(?:{IMAGE})", image):
        raise UsageError(
            f"{image!r} is not NAME@sha256:HEX; a tag may mean another image tomorrow",
            hint="`docker inspect --format '{{.RepoDigests}}' IMAGE` names it",
        )

    versions = locked_versions(lock) if lock else {"vllm": vllm}
    if not versions.get("vllm"):
        raise UsageError(
            "nothing says which vLLM the image has",
            hint="--lock WHEELHOUSE, or --vllm 0.33.0",
        )

    units = plan_pods(cluster.with_image(image), probe(root), model, nodes, **versions)
    manifest = kubernetes_manifest(units, groups)
    if secret_spans(manifest):
        raise UsageError(
            "a secret would be in the manifest",
            hint="take it out of cluster.toml: the Secret's keys become variables, too",
        )

    yield {"manifest": manifest}
    yield Data(manifest)

    head = units.ranks[0]
    notes = head.env.notes + head.command.limits
    for line in note_lines(notes, head.env.advice + head.command.advice):
        tell(line)
