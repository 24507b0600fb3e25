"""Write what other systems run: `patchkit export`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml

from patchkit.cli import complete
from patchkit.cli.out import FOLDER, PATH, PRESENT_PATH, LaidOut, next_step, tell
from patchkit.cli.render import GOOD, Block, Data, Record, VerbGroup, rendered
from patchkit.cli.runtime.node_options import note_lines
from patchkit.cli.wheel.build_options import house_option
from patchkit.measure.containerfile import build_lines, check_image, containerfile, run_lines
from patchkit.measure.fleet import plan_fleet
from patchkit.measure.kubernetes import (
    ARCH_LABELS,
    OWN_DEVICE,
    RDMA,
    KubernetesOptions,
    kubernetes_manifest,
)
from patchkit.quoting import quoted
from patchkit.runtime.envfile.env_file import locked_versions
from patchkit.runtime.envfile.header import NODES_MAX
from patchkit.runtime.envfile.write import write
from patchkit.target import targets
from patchkit.wheel.wheelhouse.contents import load_manifest

_OUTPUT = click.option("-o", "--output", type=PATH, help="Default: standard output.")
_FORCE = click.option("--force", is_flag=True, help="Replace a FILE with another content.")


@click.group(cls=VerbGroup)
def export_command() -> None:
    """Write what other systems run: an image's Containerfile, a manifest for Kubernetes."""


@export_command.command("containerfile")
@click.option(
    "--base",
    required=True,
    metavar="IMAGE@sha256:…",
    help="What it is built on: Ubuntu or Debian with the wheelhouse's Python; 24.04 has 3.12.",
)
@click.option("--unpinned", is_flag=True, help="Take a base without a digest.")
@house_option
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


@export_command.command("kubernetes")
@click.argument("model", shell_complete=complete.models)
@click.option("--file", type=PATH, help="A cluster.toml, whose nodes are asked.")
@click.option("--nodes", type=click.IntRange(2, NODES_MAX), help="All nodes; default: 2.")
@click.option("--root", type=FOLDER, help="What `patchkit probe --save` wrote on the head.")
@click.option("--lock", type=PRESENT_PATH, metavar="WHEELHOUSE", help="The versions that will run.")
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
    env = plan.ranks[0].env
    topology, at = env.node.attachment.topology, env.node.attachment
    rdma = given["rdma"] or (RDMA if topology in ("roce", "ring") else "none")
    target = targets().get(env.node.target)
    options = KubernetesOptions(
        groups=given["replicas"],
        image=given["image"],
        rdma="" if rdma == "none" else rdma,
        selector={"kubernetes.io/arch": ARCH_LABELS[target.cpu]} if target else {},
    )
    text = kubernetes_manifest(plan.cluster, plan.ranks, plan.model, options)
    # The reader is started by --json alone.
    yield Record({"apiVersion": "v1", "kind": "List", "items": yaml.safe_load_all(text)})
    what = f"{plan.model.name}, {options.groups} x {len(plan.ranks)} pods, {topology}"
    yield from _text_blocks(text, output, force=force, what=what)
    addresses = f"the nodes' addresses in Kubernetes have to be those on {at.netdev}, as"
    addresses += f" {at.address} is (`kubectl get nodes -o wide`); else `address` of the head in a"
    install = ("sudo", "install", "-d", "-o", "UID", options.cache)
    notes = [
        *env.notes,
        *plan.ranks[-1].env.notes,
        f"{addresses} cluster.toml names it",
        f"each node needs the folder of the image's user: `{quoted(*install)}`",
    ]
    if rdma == OWN_DEVICE:
        notes.append("the pods are privileged: each can do on its node what root can")
    for line in note_lines(dict.fromkeys(notes), env.advice):
        tell(line)
    if output:
        yield next_step("kubectl", "apply", "-f", output)


def _text_blocks(text: str, output: Path | None, *, force: bool, what: str) -> Iterator[Block]:
    """Write the file and say so, or print the text."""
    if output is None:
        yield Data(text)
        return
    outcome = write(output, text, force=force, private=False, by="patchkit export")
    yield GOOD + f"{output} {outcome}: {what}"
