"""Compare addresses and devices in a text with those of the host that is to use it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from patchkit.finding import Finding, Level
from patchkit.runtime.check.content import Assignment, CheckedText
from patchkit.runtime.check.finding_texts import Findings, build_finding
from patchkit.runtime.host.host import Host
from patchkit.runtime.rules.releases import read_env_data

_NAMES = read_env_data("said")["variables"]
_OWN = ("lo", "127.", "::1")  # how names and addresses of the machine itself begin


def check_host(checked: CheckedText) -> Findings:
    """Yield what this host lacks or has down; of several values of a name one has to fit."""
    if checked.host is None:
        return

    problems_by_name: dict[str, list[list[Finding]]] = {}
    for variable in checked.content.assignments:
        if variable.is_given and not variable.value.startswith("^"):
            problems = [*_check_variable(variable, checked.host)]
            problems_by_name.setdefault(variable.name, []).append(problems)

    for problems_by_value in problems_by_name.values():
        if all(problems_by_value):
            yield from chain.from_iterable(problems_by_value)


def _check_variable(variable: Assignment, host: Host) -> Findings:
    """Yield the address, interfaces and RDMA devices of a value that are not there, or down."""
    name = variable.name
    value = variable.value

    if name in _NAMES["own_address"] and not value.startswith("127."):
        rows = chain.from_iterable(netdev.addresses for netdev in host.netdevs)
        addresses = {row.address: True for row in rows}
        yield from _check_device(variable, value, "address", addresses)

    if name not in (*_NAMES["netdevs"], *_NAMES["devices"]):
        return

    interfaces = {netdev.name: netdev.up for netdev in host.netdevs}
    rdma_devices = {rdma.name: rdma.active for rdma in host.rdma}

    for part in value.lstrip("=").split(","):
        device, colon, _port = part.partition(":")
        if part == "all":
            continue

        # UCX names an RDMA device with its port (mlx5_0:1), and an interface as it is.
        if colon or name not in _NAMES["netdevs"]:
            yield from _check_device(variable, device, "RDMA device", rdma_devices)
        else:
            yield from _check_device(variable, device, "interface", interfaces)


def _check_device(
    variable: Assignment, device: str, kind: str, states: Mapping[str, bool]
) -> Findings:
    """Yield that a host has no device of a name, or that all of that name are down."""
    # A list may have prefixes, or names behind =.
    is_prefix = variable.name in _NAMES["prefixes"] and variable.value[0] != "="
    matching = [
        is_up
        for name, is_up in states.items()
        if name == device or (is_prefix and name.startswith(device))
    ]

    if not matching:
        # NCCL passes over a device that is not there; without an interface nothing starts.
        is_optional = variable.name in _NAMES["devices"]
        present = [name for name in states if not name.startswith(_OWN)]
        yield build_finding(
            "host-lacks",
            variable,
            level=Level.WARNING if is_optional else None,
            what=f"no {kind} {device}",
            has=", ".join(present) or "none at all",
        )
    elif not any(matching):
        yield build_finding("host-down", variable, what=f"{device} is down")
