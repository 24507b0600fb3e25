"""Settings of one file that contradict each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from patchkit.finding import Finding, Level
from patchkit.runtime.host.host import Host
from patchkit.runtime.lint.scan import Assignment
from patchkit.runtime.lint.values import bounds

_RDMA_ONLY = re.compile(r"NCCL_IB_(?!DISABLE$)\w+|NCCL_NET_GDR_\w+")
_GROUPS = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def check_pairs(all_found: Sequence[Assignment], host: Host | None) -> Iterator[Finding]:
    """Within each block: what is in two branches, services or commands does not contradict."""
    blocks: dict[int, list[Assignment]] = {}
    for each in all_found:
        if each.literal:
            blocks.setdefault(each.block, []).append(each)
    for together in blocks.values():
        yield from _twice(together)
        yield from _unused(together)
        yield from _netdevs(together)
    for found in all_found:
        if found.name == "NCCL_IB_HCA" and found.literal and not found.value.startswith("^"):
            yield from _half_cages(found, host)


def _twice(together: Sequence[Assignment]) -> Iterator[Finding]:
    first: dict[str, Assignment] = {}
    for each in together:
        before = first.setdefault(each.name, each)
        if before.value != each.value and _matters(each.name):
            yield Finding(
                line=each.line,
                about=each.name,
                level=Level.WARNING,
                what=f"{each.shown}, and line {before.line} says {before.shown}",
                why="The later one counts; with docker run -e and in YAML a reader cannot tell.",
                hint="keep one",
            )


def _matters(name: str) -> bool:
    return (
        re.match(r"(NCCL|VLLM|RAY|GLOO|TP|UCX|HF|TRITON|CUDA|OMP|TORCH|PYTORCH)_", name) is not None
    )


def _unused(together: Sequence[Assignment]) -> Iterator[Finding]:
    last = {each.name: each for each in together}
    switch = last.get("NCCL_IB_DISABLE")
    if switch is None or switch.value in ("", "0"):
        return
    for each in last.values():
        if _RDMA_ONLY.fullmatch(each.name):
            yield Finding(
                line=each.line,
                about=each.name,
                level=Level.WARNING,
                what=f"{each.shown}, and line {switch.line} says {switch.shown}",
                why="NCCL then uses no RDMA device, and reads nothing else about them.",
                hint="leave NCCL_IB_DISABLE out if every node has RDMA, else this one",
                source="NCCL net_ib.cc",
            )


def _netdevs(together: Sequence[Assignment]) -> Iterator[Finding]:
    last = {each.name: each for each in together}
    nccl = last.get("NCCL_SOCKET_IFNAME")
    if nccl is None or nccl.value.startswith("^"):
        return
    for name in _GROUPS:
        each = last.get(name)
        if each and each.value and not _takes(nccl.value, each.value):
            yield Finding(
                line=each.line,
                about=name,
                level=Level.WARNING,
                what=f"{each.shown}, and line {nccl.line} says {nccl.shown}",
                why="Both name the way to the other nodes: one cable, so one interface.",
                hint="name the interface that is cabled in both; `patchkit probe` shows it",
            )


def _takes(listed: str, netdev: str) -> bool:
    """Whether NCCL's list, of prefixes or with = of whole names, has an interface."""
    exact, names = listed.startswith("="), listed.lstrip("=").split(",")
    return any(netdev == name or (not exact and netdev.startswith(name)) for name in names)


def _half_cages(found: Assignment, host: Host | None) -> Iterator[Finding]:
    names = dict.fromkeys(name.partition(":")[0] for name in found.value.lstrip("=").split(","))
    (row,) = bounds()["twins"]
    for name in names:
        twin = _twin(name, row, host)
        if twin and twin not in names:
            yield Finding(
                line=found.line,
                about=found.name,
                level=Level.WARNING,
                what=f"{found.shown}: without {twin}, the other half of the cage",
                why=row["why"],
                hint=f"write {name},{twin}",
                source=row["source"],
            )


def _twin(name: str, row: Mapping[str, Any], host: Host | None) -> str:
    """By what this host has, or else by the names that devices have on a Spark."""
    device = next((each for each in host.rdma if each.name == name), None) if host else None
    if device:
        return device.twin
    if not re.fullmatch(row["pattern"], name):
        return ""
    one, other = map(str, row["half"])
    return other + name[len(one) :] if name.startswith(one) else one + name[len(other) :]
