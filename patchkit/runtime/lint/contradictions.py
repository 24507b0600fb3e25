"""Find settings of one file that contradict each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from patchkit.finding import Finding, Level
from patchkit.runtime.files.content import Assignment, FileContent
from patchkit.runtime.host.host import Host
from patchkit.runtime.host.networks import twin_state
from patchkit.runtime.lint.placeholders import is_placeholder
from patchkit.runtime.lint.values import bounds

_RDMA_ONLY = re.compile(r"NCCL_IB_(?!DISABLE$)\w+|NCCL_NET_GDR_\w+")
_GROUPS = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
# What is started with the variables that are set so far.
_STARTS = re.compile(r"|vllm .*|ray start|python.*|torchrun|mpirun|docker.*|.*\.(py|sh)")
_MATTERS = re.compile(r"(NCCL|VLLM|RAY|GLOO|TP|UCX|HF|TRITON|CUDA|OMP|TORCH|PYTORCH)_")


def check_contradictions(content: FileContent, host: Host | None) -> Iterator[Finding]:
    """Check each block by itself: two branches, services or commands do not contradict."""
    blocks: dict[int, list[Assignment]] = {}
    started = [each.line for each in content.commands if _STARTS.fullmatch(each.program)]
    for each in content.assignments:
        # What is still to be filled in is told of by itself.
        if each.literal and not is_placeholder(each.name, each.value):
            blocks.setdefault(each.block, []).append(each)
    for together in blocks.values():
        # Of several the last one counts, as in a shell.
        last = {each.name: each for each in together}
        yield from _twice(together, started)
        yield from _unused(last)
        yield from _netdevs(last)
    for each in content.assignments:
        if each.name == "NCCL_IB_HCA" and each.literal and not each.value.startswith("^"):
            yield from _half_cages(each, host)


def _twice(together: Sequence[Assignment], started: Sequence[int]) -> Iterator[Finding]:
    """Return variables with two values; ``started`` are the lines of what is started with them."""
    first: dict[str, Assignment] = {}
    for each in together:
        before = first.setdefault(each.name, each)
        if any(before.line < line < each.line for line in started):
            first[each.name] = each  # set anew, for what is started next
        elif before.value != each.value and _MATTERS.match(each.name):
            yield each.warning(
                f"{each.shown}, and line {before.line} says {before.shown}",
                why="The later one counts; with docker run -e and in YAML a reader cannot tell.",
                hint="keep one",
            )


def _unused(last: Mapping[str, Assignment]) -> Iterator[Finding]:
    switch = last.get("NCCL_IB_DISABLE")
    if switch is None or switch.value in ("", "0"):
        return
    for each in last.values():
        if _RDMA_ONLY.fullmatch(each.name):
            yield each.warning(
                f"{each.shown}, and line {switch.line} says {switch.shown}",
                why="NCCL then uses no RDMA device, and reads nothing else about them.",
                hint="leave NCCL_IB_DISABLE out if every node has RDMA, else this one",
                source="NCCL net_ib.cc",
            )


def _netdevs(last: Mapping[str, Assignment]) -> Iterator[Finding]:
    nccl = last.get("NCCL_SOCKET_IFNAME")
    # ^ is NCCL's sign for all but these: such a list names no interface to compare.
    if nccl is None or nccl.value.startswith("^"):
        return
    # NCCL takes a list of prefixes or, behind =, of whole names; the others take whole names.
    whole, names = nccl.value.startswith("="), nccl.value.lstrip("=").split(",")
    # By value: Gloo's and TensorPipe's are mostly the same, and one line says enough.
    for each in {last[name].value: last[name] for name in _GROUPS[::-1] if name in last}.values():
        taken = each.value in names if whole else each.value.startswith(tuple(names))
        if each.value and not taken:
            yield replace(
                each.warning(
                    f"{each.shown}, and line {nccl.line} says {nccl.shown}",
                    why="Both name a way to the other nodes; control over the LAN and data over "
                    "the cable work as well.",
                    hint="see that each reaches every node; `patchkit probe` shows what is cabled",
                ),
                level=Level.NOTE,
            )


def _half_cages(assigned: Assignment, host: Host | None) -> Iterator[Finding]:
    names = dict.fromkeys(name.partition(":")[0] for name in assigned.value.lstrip("=").split(","))
    (row,) = bounds()["twins"]
    for name in names:
        twin = _twin(name, row, host)
        if twin and twin not in names:
            yield assigned.warning(
                f"{assigned.shown}: without {twin}, the other half of the cage",
                why=row["why"],
                hint=f"write {name},{twin}",
                source=row["source"],
            )


def _twin(name: str, row: Mapping[str, Any], host: Host | None) -> str:
    """Return the other half by what this host has, else by the names of devices on a Spark."""
    device = next((each for each in host.rdma if each.name == name), None) if host else None
    if device and host:
        netdev = host.netdev(device.netdev)
        half = next((each for each in host.rdma if each.name == device.twin), None)
        # `patchkit env` leaves these out as well.
        left_out = netdev and twin_state(host, netdev) in ("down", "random", "bare-first")
        return "" if half is None or not half.active or left_out else half.name
    if not re.fullmatch(row["pattern"], name):
        return ""
    one, other = map(str, row["half"])
    return other + name[len(one) :] if name.startswith(one) else one + name[len(other) :]
