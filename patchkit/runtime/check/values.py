"""Check values of variables: their ranges, addresses, placeholders, and what contradicts what."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from patchkit.finding import Finding, Level
from patchkit.runtime.check.content import (
    DOCKERFILE,
    SHELL,
    Assignment,
    shorten,
)
from patchkit.runtime.check.messages import make_finding
from patchkit.runtime.check.situation import CheckedText
from patchkit.runtime.check.versions import runs_upstream
from patchkit.runtime.host.host import Host
from patchkit.runtime.host.networks import twin_state
from patchkit.runtime.rules.sensitive_names import is_secret
from patchkit.runtime.rules.variable_values import (
    ADDRESS_NAMES,
    ADDRESSES,
    find_value_problems,
    is_link_local,
    is_placeholder,
    value_tables,
)
from patchkit.runtime.rules.variables import nearest, values_by_release, vllm_values
from patchkit.runtime.rules.vllm_values import Takes

_SWITCH = {"true": "1", "yes": "1", "on": "1", "false": "0", "no": "0", "off": "0"}
_READ = re.compile(r"(NCCL|VLLM|GLOO|TP|UCX|RAY|MASTER)_\w+")
# No process group is set up without these; without the others it only goes another way.
_NEEDED = re.compile(r"VLLM_HOST_IP|MASTER_ADDR|RAY_\w*ADDRESS|(NCCL|GLOO|TP)_SOCKET_IFNAME")
_ADDRESS_FLAGS = ("--master-addr", "--node-ip-address", "--address")
_TEMPLATE = re.compile(r"(?i)(^|[._-])(example|sample|template|tmpl|tpl|dist|j2)([._-]|$)")
_RDMA_ONLY = re.compile(r"NCCL_IB_(?!DISABLE$)\w+|NCCL_NET_GDR_\w+")
_MATTERS = re.compile(r"(NCCL|VLLM|RAY|GLOO|TP|UCX|HF|TRITON|CUDA|OMP|TORCH|PYTORCH)_")


def check_values(checked: CheckedText) -> Iterator[Finding]:
    """Yield values that a variable cannot have."""
    content, situation = checked.content, checked.situation
    vllm = situation.get("vllm", "")
    takes_by_name = vllm_values(vllm, checked.home)
    # A fork of a release may take more.
    level = Level.WARNING if runs_upstream(content) is False else None
    for assignment in content.assignments:
        name, value = assignment.name, assignment.value
        if not assignment.is_known:
            continue
        for problem in find_value_problems(name, value, situation.get("role", "")):
            yield make_finding(
                "value",
                assignment,
                Level.ERROR if problem.stops else None,
                problem=problem.what,
                why=problem.why,
                hint=problem.hint,
                source=problem.source,
            )
        takes = takes_by_name.get(name) if name.startswith("VLLM_") else None
        if takes and not takes.has(value) and (assignment.is_given or not value):
            key = "value-refused" if takes.enforced else "value-unknown"
            told = {"reader": f"vLLM {vllm}".rstrip(), "takes": takes.in_words}
            yield make_finding(
                key, assignment, level, **told, hint=_suggest_value(name, value, takes)
            )
        if name in ADDRESSES and is_link_local(value):
            yield make_finding("link-local-address", assignment)


def _suggest_value(name: str, value: str, takes: Takes) -> str:
    if not takes.words:
        switch = _SWITCH.get(value.lower())
        return f"write {name}={switch}" if switch else f"write a number, or leave {name} out"
    taking = [row for row in values_by_release(name) if row[2].has(value)]
    if taking:
        return f"leave it out: {taking[0][0]} to {taking[-1][1]} take {shorten(value)}"
    close = nearest(value, takes.words)
    return f"did you mean {close}?" if close else f"write one of these, or leave {name} out"


def is_template(where: str) -> bool:
    """Return whether a file's name says that it is still to be filled in."""
    return _TEMPLATE.search(PurePath(where).name) is not None


def check_placeholders(checked: CheckedText) -> Iterator[Finding]:
    """Yield variables and flags of the launch whose values are still to be filled in."""
    grave = None if is_template(checked.where) else Level.ERROR
    for assignment in checked.content.assignments:
        name = assignment.name
        read = _READ.fullmatch(name) or ADDRESS_NAMES.fullmatch(name)
        # A secret that is not there yet is told of by itself.
        is_open = assignment.is_known and is_placeholder(name, assignment.value)
        if read and is_open and not is_secret(name):
            level = grave if _NEEDED.fullmatch(name) else None
            yield make_finding("placeholder", assignment, level)
    for command in checked.content.commands:
        for flag in command.flags:
            address = flag.value.rpartition(":")[0] or flag.value
            if flag.name in _ADDRESS_FLAGS and is_placeholder("_IP", address):
                yield make_finding("placeholder", flag, grave)


def check_contradictions(checked: CheckedText) -> Iterator[Finding]:
    """Check each block by itself: two services or commands do not contradict each other."""
    blocks: dict[int, list[Assignment]] = {}
    for assignment in checked.content.assignments:
        if assignment.is_given:
            blocks.setdefault(assignment.block, []).append(assignment)
    for block, together in blocks.items():
        # Of several the last one counts, as in a shell, which may set one anew for what follows.
        last = {assignment.name: assignment for assignment in together}
        first: dict[str, Assignment] = {}
        for assignment in (
            together if block or checked.content.kind not in (SHELL, DOCKERFILE) else ()
        ):
            before = first.setdefault(assignment.name, assignment)
            if before.value != assignment.value and _MATTERS.match(assignment.name):
                yield make_finding("set-twice", assignment, first=before.line, before=before.shown)
        switch, hca = last.get("NCCL_IB_DISABLE"), last.get("NCCL_IB_HCA")
        if switch and switch.value != "0":
            for name in filter(_RDMA_ONLY.fullmatch, last):
                told = {"first": switch.line, "before": switch.shown}
                yield make_finding("rdma-off", last[name], None, **told)
        elif hca and not hca.value.startswith("^"):
            yield from _find_half_cages(hca, checked.host)


def _find_half_cages(assignment: Assignment, host: Host | None) -> Iterator[Finding]:
    names = [part.partition(":")[0] for part in assignment.value.lstrip("=").split(",")]
    (row,) = value_tables()["twins"]
    twins = {name: _find_twin(name, row, host) for name in names}
    missing = [twin for twin in twins.values() if twin and twin not in names]
    if missing:
        twin, complete = ",".join(missing), ",".join((*twins, *missing))
        told = {"twin": twin, "complete": complete, "why": row["why"], "source": row["source"]}
        yield make_finding("half-cage", assignment, None, **told)


def _find_twin(name: str, row: Mapping[str, Any], host: Host | None) -> str:
    """Return the other half by what this host has, else by the names of devices on a Spark."""
    device = next((found for found in host.rdma if found.name == name), None) if host else None
    if device and host:
        netdev = host.netdev(device.netdev)
        half = next((found for found in host.rdma if found.name == device.twin), None)
        # `patchkit env` leaves these out as well.
        left_out = netdev and twin_state(host, netdev) in ("down", "random", "bare-first")
        return "" if half is None or not half.active or left_out else half.name
    if not re.fullmatch(row["pattern"], name):
        return ""
    one, other = map(str, row["half"])
    return other + name[len(one) :] if name.startswith(one) else one + name[len(other) :]
