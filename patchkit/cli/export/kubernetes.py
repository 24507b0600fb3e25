"""Write a manifest for Kubernetes: `patchkit export kubernetes`."""

from __future__ import annotations

from pathlib import Path

import click
import yaml

from patchkit.cli.export.options import Exported, exported, put, tell_notes
from patchkit.cli.next_step import next_step
from patchkit.cli.out import as_json, echo, print_json
from patchkit.errors import UsageError
from patchkit.measure.kubernetes import (
    ARCH_LABELS,
    CACHE,
    OWN_DEVICE,
    RDMA,
    KubernetesOptions,
    check_image,
    kubernetes_manifest,
)
from patchkit.quoting import quoted
from patchkit.target import targets

_NONE = "none"
_INSTALL = ("sudo", "install", "-d", "-o", "UID")


@click.command("kubernetes")
@exported()
@click.option("--image", required=True, metavar="NAME@sha256:…", help="The same one for all pods.")
@click.option("--allow-tag", is_flag=True, help="Take an image without a digest.")
@click.option("--name", metavar="NAME", help="Of the set.  [default: vllm]")
@click.option("--namespace", metavar="NAME", default="", help="Default: kubectl's.")
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
@click.option(
    "--secret",
    metavar="NAME",
    help="A Secret with VLLM_API_KEY, HF_TOKEN.  [default: NAME-secrets]",
)
@click.option(
    "--pull-secret", metavar="NAME", default="", help="A Secret for the image's registry."
)
@click.option("--runtime-class", metavar="NAME", default="", help="nvidia, for example, on k3s.")
@click.option(
    "--node-selector", "labels", metavar="LABEL=VALUE", multiple=True, help="Of the nodes to take."
)
@as_json
def kubernetes(
    *,
    plan: Exported,
    output: Path | None,
    force: bool,
    image: str,
    allow_tag: bool,
    name: str | None,
    namespace: str,
    replicas: int,
    rdma: str | None,
    cache: str,
    secret: str | None,
    pull_secret: str,
    runtime_class: str,
    labels: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write one manifest for Kubernetes' LeaderWorkerSet: vLLM over several nodes, without Ray.

    \b
      patchkit export kubernetes openai/gpt-oss-120b --nodes 2 --lock wheelhouse \\
        --image registry.example/vllm-gb10@sha256:… -o vllm.yaml
      kubectl apply -f vllm.yaml

    Variables and flags are those of `patchkit up`. One machine's facts do for all, if they
    are cabled alike; with --file every node is asked, and workers that differ are an error.
    """
    check_image(image, tag=allow_tag)
    own = name or plan.cluster.name
    options = KubernetesOptions(
        name=own,
        namespace=namespace,
        groups=replicas,
        image=image,
        rdma=_rdma(plan, rdma),
        cache=cache.rstrip("/") or "/",
        secret=secret or f"{own}-secrets",
        pull_secret=pull_secret,
        runtime_class=runtime_class,
        selector={**_arch(plan), **dict(map(_label, labels))},
    )
    text = kubernetes_manifest(plan.cluster, plan.ranks, plan.model, options)
    if as_json:
        items = list(yaml.safe_load_all(text))
        print_json({"apiVersion": "v1", "kind": "List", "items": items})
        return
    topology = plan.ranks[0].env.node.topology
    put(
        text,
        output,
        force=force,
        what=f"{plan.model.name}, {replicas} x {len(plan.ranks)} pods, {topology}",
        by="patchkit export kubernetes",
    )
    tell_notes(plan, *_notes(plan, options))
    if output:
        echo([next_step("kubectl", "apply", "-f", output)])


def _rdma(plan: Exported, asked: str | None) -> str:
    if asked:
        return "" if asked == _NONE else asked
    rdma = plan.ranks[0].env.node.topology in ("roce", "ring")
    return RDMA if rdma else ""


def _arch(plan: Exported) -> dict[str, str]:
    """Return the label of nodes with the target's CPU."""
    target = targets().get(plan.ranks[0].env.node.target)
    arch = ARCH_LABELS.get(target.cpu) if target else None
    return {"kubernetes.io/arch": arch} if arch else {}


def _label(text: str) -> tuple[str, str]:
    label, sign, value = text.partition("=")
    if not (label and sign):
        raise UsageError(f"--node-selector {text}: is no label", hint="as LABEL=VALUE")
    return label, value


def _notes(plan: Exported, options: KubernetesOptions) -> list[str]:
    at = plan.ranks[0].env.node.attachment
    place = options.cache
    addresses = f"the nodes' addresses in Kubernetes have to be those on {at.netdev}"
    notes = [
        f"{addresses}, as {at.address} is (`kubectl get nodes -o wide`); else --head-ip names it",
        f"each node needs the folder of the image's user: `{quoted(*_INSTALL, place)}`",
    ]
    if options.rdma == OWN_DEVICE:
        notes.append("the pods are privileged: each can do on its node what root can")
    return notes
