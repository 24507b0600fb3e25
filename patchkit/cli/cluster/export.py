"""Write what other systems run: `patchkit export`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml

from patchkit.cli import complete
from patchkit.cli.next_step import next_step
from patchkit.cli.out import FOLDER, PATH, PRESENT_PATH, LaidOut, tell
from patchkit.cli.render import GOOD, Block, Data, Record, VerbGroup, rendered
from patchkit.cli.runtime.node_options import note_lines
from patchkit.errors import UsageError
from patchkit.measure.containerfile import build_lines, check_image, containerfile, run_lines
from patchkit.measure.fleet import FleetPlan, plan_fleet
from patchkit.measure.kubernetes import (
    ARCH_LABELS,
    CACHE,
    OWN_DEVICE,
    RDMA,
    KubernetesOptions,
    kubernetes_manifest,
)
from patchkit.quoting import quoted
from patchkit.runtime.envfile.env_file import locked_versions
from patchkit.runtime.envfile.header import nodes_max
from patchkit.runtime.envfile.write import write
from patchkit.target import targets
from patchkit.wheel.wheelhouse.contents import load_manifest

_OUTPUT = click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=PATH,
    help="Write FILE, all or nothing; default: standard output.",
)
_FORCE = click.option("--force", is_flag=True, help="Replace a FILE with another content.")


@click.group(cls=VerbGroup)
def command() -> None:
    """Write what other systems run: an image's Containerfile, a manifest for Kubernetes."""


@command.command("containerfile")
@click.option(
    "--base",
    required=True,
    metavar="IMAGE@sha256:…",
    help="What it is built on: Ubuntu or Debian with the wheelhouse's Python; 24.04 has 3.12.",
)
@click.option("--unpinned", is_flag=True, help="Take a base without a digest.")
@click.option(
    "--dir",
    "house",
    type=PATH,
    default=Path("wheelhouse"),
    show_default=True,
    help="The wheelhouse, in the folder that is built from.",
)
@_OUTPUT
@_FORCE
@rendered
def write_containerfile(
    *, base: str, unpinned: bool, house: Path, output: Path | None, force: bool
) -> Iterator[Block]:
    """Write what docker, podman and buildah make an image of the wheelhouse from.

    \b
      patchkit export containerfile --base ubuntu:24.04@sha256:… -o Containerfile
    """
    check_image(base, "--base", "--unpinned", pinned=not unpinned)
    made = containerfile(load_manifest(house), base, house.as_posix())
    builds = list(build_lines(made.platform, output or Path("Containerfile")))
    runs = list(run_lines())
    yield Record(
        {"containerfile": made.text, "platform": made.platform, "build": builds, "run": runs}
    )
    yield from _text_blocks(made.text, output, force=force, what=made.platform)
    if output:
        for title, lines in (("build it", builds), ("run it on each node", runs)):
            tell(f"{title} with one of:")
            for words in lines:
                tell(LaidOut(f"  {quoted(*words)}"))


@command.command("kubernetes")
@click.argument("model", shell_complete=complete.models)
@click.option(
    "--file",
    type=PATH,
    help="A cluster.toml: its [serve], and its nodes, asked by ssh; default: this machine.",
)
@click.option(
    "--nodes",
    type=click.IntRange(2, nodes_max()),
    metavar="N",
    help="So many machines that are as the first, which alone is asked; default: 2.",
)
@click.option(
    "--root",
    type=FOLDER,
    help="Instead of this machine: what `patchkit probe --save` wrote on the head.",
)
@click.option(
    "--lock",
    type=PRESENT_PATH,
    metavar="WHEELHOUSE",
    help="The versions that will run: those of this wheelhouse.",
)
@click.option("--vllm", metavar="VERSION", default="", help="Instead of the installed one.")
@_OUTPUT
@_FORCE
@click.option("--image", required=True, metavar="NAME@sha256:…", help="The same one for all pods.")
@click.option("--allow-tag", is_flag=True, help="Take an image without a digest.")
@click.option("--replicas", type=click.IntRange(1), default=1, help="Groups, each with all nodes.")
@click.option(
    "--rdma",
    metavar="RESOURCE|host|none",
    help="The RDMA device plugin's resource; host: /dev/infiniband, privileged.  "
    f"[default with RoCE: {RDMA}]",
)
@click.option(
    "--cache",
    metavar="DIR",
    default=CACHE,
    show_default=True,
    help="On a disk of each node: compiled code and downloads.",
)
@click.option("--runtime-class", metavar="NAME", default="", help="nvidia, for example, on k3s.")
@click.option(
    "--node-selector", "labels", metavar="LABEL=VALUE", multiple=True, help="Of the nodes to take."
)
@rendered
def write_kubernetes(
    model: str, *, output: Path | None, force: bool, **given: Any
) -> Iterator[Block]:
    """Write one manifest for Kubernetes' LeaderWorkerSet: vLLM over several nodes, without Ray.

    \b
      patchkit export kubernetes openai/gpt-oss-120b --nodes 2 --lock wheelhouse \\
        --image registry.example/vllm-gb10@sha256:… -o vllm.yaml
      kubectl apply -f vllm.yaml

    Variables and flags are those of `patchkit up`. One machine's facts do for all, if they
    are cabled alike; with --file every node is asked, and workers that differ are an error.
    """
    check_image(given["image"], "--image", "--allow-tag", pinned=not given["allow_tag"])
    versions = dict(locked_versions(given["lock"])) if given["lock"] else {}
    versions["vllm"] = given["vllm"] or versions.get("vllm", "")
    plan = plan_fleet(model, given["file"], given["nodes"], given["root"], versions)
    options = _kubernetes_options(plan, given)
    text = kubernetes_manifest(plan.cluster, plan.ranks, plan.model, options)
    # The reader is started by --json alone.
    yield Record({"apiVersion": "v1", "kind": "List", "items": yaml.safe_load_all(text)})
    topology = plan.ranks[0].env.node.topology
    pods = f"{options.groups} x {len(plan.ranks)} pods"
    what = f"{plan.model.name}, {pods}, {topology}"
    yield from _text_blocks(text, output, force=force, what=what)
    _tell_notes(plan, options)
    if output:
        yield next_step("kubectl", "apply", "-f", output)


def _kubernetes_options(plan: FleetPlan, given: dict[str, Any]) -> KubernetesOptions:
    node = plan.ranks[0].env.node
    rdma = given["rdma"] or (RDMA if node.topology in ("roce", "ring") else "")
    target = targets().get(node.target)
    arch = ARCH_LABELS.get(target.cpu) if target else None
    selector = {"kubernetes.io/arch": arch} if arch else {}
    for text in given["labels"]:
        label, _, value = text.partition("=")
        if not (label and value):
            raise UsageError(f"--node-selector {text}: is no label", hint="as LABEL=VALUE")
        selector[label] = value
    return KubernetesOptions(
        groups=given["replicas"],
        image=given["image"],
        rdma="" if rdma == "none" else rdma,
        cache=given["cache"].rstrip("/") or "/",
        runtime_class=given["runtime_class"],
        selector=selector,
    )


def _text_blocks(text: str, output: Path | None, *, force: bool, what: str) -> Iterator[Block]:
    """Write the file and say so, or print the text."""
    if output is None:
        yield Data(text)
        return
    outcome = write(output, text, force=force, private=False, by="patchkit export")
    yield GOOD + f"{output} {outcome}: {what}"


def _tell_notes(plan: FleetPlan, options: KubernetesOptions) -> None:
    env = plan.ranks[0].env
    at = env.node.attachment
    install = ("sudo", "install", "-d", "-o", "UID", options.cache)
    addresses = f"the nodes' addresses in Kubernetes have to be those on {at.netdev}, as"
    addresses += f" {at.address} is (`kubectl get nodes -o wide`); else `address` of the head in a"
    notes = [
        *env.notes,
        *plan.ranks[-1].env.notes,
        f"{addresses} cluster.toml names it",
        f"each node needs the folder of the image's user: `{quoted(*install)}`",
    ]
    if options.rdma == OWN_DEVICE:
        notes.append("the pods are privileged: each can do on its node what root can")
    for line in note_lines(dict.fromkeys(notes), env.advice):
        tell(line)
