"""Compare addresses and devices in a text with those of the host that is to use the text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain

from patchkit.finding import Finding, Level
from patchkit.runtime.check.content import Assignment, CheckedText, build_finding
from patchkit.runtime.host.host import Host, Rdma, twin_state
from patchkit.runtime.rules.releases import read_env_data

_NAMES = read_env_data("said")["variables"]
_LOOPBACK = ("127.", "::1")
_NONE = "none at all"

# States of a cage's second half in which `patchkit env` also leaves it out.
_LEFT_OUT = ("down", "random", "bare-first")


def check_host(checked: CheckedText) -> Iterator[Finding]:
    """Yield addresses and devices in a text that its host lacks or that are down.

    If a file sets a variable several times, one value without a problem is enough.
    """
    if checked.host is None:
        return

    problems_by_name: dict[str, list[list[Finding]]] = {}
    for variable in checked.content.assignments:
        if variable.is_given and not variable.value.startswith("^"):
            problems = [
                *_check_own_address(variable, checked.host),
                *_check_device_list(variable, checked.host),
            ]
            problems_by_name.setdefault(variable.name, []).append(problems)

    for problems_by_value in problems_by_name.values():
        if all(problems_by_value):
            yield from chain.from_iterable(problems_by_value)


def _check_own_address(variable: Assignment, host: Host) -> Iterator[Finding]:
    is_own_address = variable.name in _NAMES["own_address"]
    if not is_own_address or variable.value.startswith("127."):
        return

    addresses = [row.address for netdev in host.netdevs for row in netdev.addresses]

    if variable.value not in addresses:
        other_names = [text for text in addresses if not text.startswith(_LOOPBACK)]
        yield build_finding(
            "host-lacks",
            variable,
            what=f"no address {variable.value}",
            has=", ".join(other_names) or _NONE,
        )


def _check_device_list(variable: Assignment, host: Host) -> Iterator[Finding]:
    """Yield the interfaces and RDMA devices in a list that the host lacks or that are down."""
    if variable.name not in (*_NAMES["netdevs"], *_NAMES["devices"]):
        return
    for part in variable.value.lstrip("=").split(","):
        device, colon, _port = part.partition(":")
        # A list for UCX may hold both kinds. Only RDMA devices have a port there: mlx5_0:1.
        if colon or variable.name not in _NAMES["netdevs"]:
            kind = "RDMA device"
            states = {rdma.name: rdma.active for rdma in host.rdma}
        else:
            kind = "interface"
            states = {netdev.name: netdev.up for netdev in host.netdevs}
        if part != "all":
            yield from _check_device(device, kind, variable, states)


def _check_device(
    device: str, kind: str, variable: Assignment, states: Mapping[str, bool]
) -> Iterator[Finding]:
    """Yield a finding if the host lacks a device, or if all devices that the name means are down.

    ``states`` maps the name of each device of that kind to whether it is up.
    """
    matching = _find_matching(device, variable, states)
    if not matching:
        # NCCL starts without an RDMA device that is missing, but not without a missing interface.
        is_optional = variable.name in _NAMES["devices"]
        other_names = [name for name in states if name != "lo"]
        yield build_finding(
            "host-lacks",
            variable,
            level=Level.WARNING if is_optional else None,
            what=f"no {kind} {device}",
            has=", ".join(other_names) or _NONE,
        )
    elif not any(matching.values()):
        yield build_finding("host-down", variable, what=f"{device} is down")


def _find_matching(
    device: str, variable: Assignment, states: Mapping[str, bool]
) -> dict[str, bool]:
    """Return device → whether it is up, for the devices that a name in a list means.

    For some variables the name may be a beginning, unless their value begins with "=".
    """
    is_exact = variable.value.startswith("=")
    if variable.name in _NAMES["prefixes"] and not is_exact:
        return {name: up for name, up in states.items() if name.startswith(device)}
    return {device: states[device]} if device in states else {}


def find_half_cages(hca: Assignment, host: Host | None) -> Iterator[Finding]:
    """Yield a finding if NCCL_IB_HCA names only one of the two RDMA devices of a QSFP cage.

    The second one is looked up on the host. If the host is unknown or lacks the first one, the
    device names of a DGX Spark decide.
    """
    (row,) = read_env_data("values")["twins"]
    parts = hca.value.lstrip("=").split(",")
    names = [part.partition(":")[0] for part in parts]
    twins = [_find_twin(name, host) for name in names]
    missing = [twin for twin in twins if twin and twin not in names]

    if missing:
        yield build_finding(
            "half-cage",
            hca,
            twin=",".join(missing),
            complete=",".join((*names, *missing)),
            why=row["why"],
            source=row["source"],
        )


def _find_twin(name: str, host: Host | None) -> str:
    """Return the name of the other RDMA device in a device's cage, "" if it is absent or not used.

    The device names of a DGX Spark decide if the host is unknown or lacks the device.
    """
    if host is not None:
        for device in host.rdma:
            if device.name == name:
                return _find_used_twin(device, host)

    (row,) = read_env_data("values")["twins"]
    first_prefix, second_prefix = row["half"]
    if not re.fullmatch(row["pattern"], name):
        return ""

    if name.startswith(first_prefix):
        return str(second_prefix + name.removeprefix(first_prefix))
    return str(first_prefix + name.removeprefix(second_prefix))


def _find_used_twin(device: Rdma, host: Host) -> str:
    netdev = host.netdev(device.netdev)
    if netdev and twin_state(host, netdev) in _LEFT_OUT:
        return ""

    for twin in host.rdma:
        if twin.name == device.twin and twin.active:
            return twin.name

    return ""
