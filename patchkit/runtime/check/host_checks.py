"""Compare addresses and devices in a text with those of the host that is to use the text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain

from patchkit.finding import Finding, Level
from patchkit.runtime.check.content import Assignment, CheckedText
from patchkit.runtime.check.finding_texts import build_finding
from patchkit.runtime.host.host import Host, Rdma
from patchkit.runtime.host.networks import twin_state
from patchkit.runtime.rules.releases import read_env_data

_NAMES = read_env_data("said")["variables"]
_LOOPBACK = ("127.", "::1")
_NONE = "none at all"

# States in which `patchkit env`, too, leaves out the second half of a cage.
_LEFT_OUT = ("down", "random", "bare-first")


def check_host(checked: CheckedText) -> Iterator[Finding]:
    """Yield addresses and devices that this host lacks, or that are down.

    A file may set a variable several times: one value without a problem is enough.
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
    """Yield the interfaces and RDMA devices of a list that the host lacks, or that are down."""
    if variable.name not in (*_NAMES["netdevs"], *_NAMES["devices"]):
        return
    for part in variable.value.lstrip("=").split(","):
        device, colon, _port = part.partition(":")
        # A list of UCX holds both: RDMA devices with a port (mlx5_0:1), interfaces without one.
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
    """Yield that a host lacks a device, or that all devices which the name means are down.

    ``states`` is name → whether the device is up.
    """
    matching = _find_matching(device, variable, states)
    if not matching:
        # NCCL ignores an RDMA device that is missing; without its interface it does not start.
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
    """Return the devices that a name in a list means, and whether each is up.

    Some variables take the beginning of a name, unless their value begins with "=".
    """
    is_exact = variable.value.startswith("=")
    if variable.name in _NAMES["prefixes"] and not is_exact:
        return {name: up for name, up in states.items() if name.startswith(device)}
    return {device: states[device]} if device in states else {}


def find_half_cages(hca: Assignment, host: Host | None) -> Iterator[Finding]:
    """Yield that NCCL_IB_HCA names only one half of a cage, the port of two RDMA devices.

    The other half is that of this host, else the one that a DGX Spark has by its names.
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
    """Return the RDMA device that is the other half of a device's cage.

    Return "" if there is none or it is not used. The names of a DGX Spark decide if the host is
    not known or lacks the device.
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
