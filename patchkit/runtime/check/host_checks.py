"""Compare addresses and devices in a text with those of the host that is to use it."""

from __future__ import annotations

import re
from collections.abc import Iterator
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

# `patchkit env` leaves the second half out in these states as well.
_LEFT_OUT = ("down", "random", "bare-first")


def check_host(checked: CheckedText) -> Iterator[Finding]:
    """Yield what this host lacks or has down; of several values of a name one has to fit."""
    if checked.host is None:
        return
    problems_by_name: dict[str, list[list[Finding]]] = {}
    for variable in checked.content.assignments:
        if variable.is_given and not variable.value.startswith("^"):
            problems = [
                *_check_address(variable, checked.host),
                *_check_devices(variable, checked.host),
            ]
            problems_by_name.setdefault(variable.name, []).append(problems)

    for problems_by_value in problems_by_name.values():
        if all(problems_by_value):
            yield from chain.from_iterable(problems_by_value)


def _check_address(variable: Assignment, host: Host) -> Iterator[Finding]:
    is_own_address = variable.name in _NAMES["own_address"]
    if not is_own_address or variable.value.startswith("127."):
        return
    addresses = [row.address for netdev in host.netdevs for row in netdev.addresses]
    if variable.value not in addresses:
        others = [text for text in addresses if not text.startswith(_LOOPBACK)]
        yield build_finding(
            "host-lacks",
            variable,
            what=f"no address {variable.value}",
            has=", ".join(others) or _NONE,
        )


def _check_devices(variable: Assignment, host: Host) -> Iterator[Finding]:
    """Yield the interfaces and RDMA devices of a list that are not there, or down."""
    name = variable.name
    if name not in (*_NAMES["netdevs"], *_NAMES["devices"]):
        return
    takes_prefixes = name in _NAMES["prefixes"] and not variable.value.startswith("=")
    for part in variable.value.lstrip("=").split(","):
        if part == "all":
            continue
        device, colon, _port = part.partition(":")
        # UCX names an RDMA device with its port (mlx5_0:1), and an interface as it is.
        is_rdma = bool(colon) or name not in _NAMES["netdevs"]
        states = {netdev.name: netdev.up for netdev in host.netdevs}
        if is_rdma:
            states = {rdma.name: rdma.active for rdma in host.rdma}

        matching = [known for known in states if known == device]
        if takes_prefixes:
            matching = [known for known in states if known.startswith(device)]
        if not matching:
            others = [known for known in states if known != "lo"]
            yield build_finding(
                "host-lacks",
                variable,
                # NCCL passes over a device that is not there; without an interface nothing starts.
                level=Level.WARNING if name in _NAMES["devices"] else None,
                what=f"no {'RDMA device' if is_rdma else 'interface'} {device}",
                has=", ".join(others) or _NONE,
            )
        elif not any(states[known] for known in matching):
            yield build_finding("host-down", variable, what=f"{device} is down")


def find_half_cages(hca: Assignment, host: Host | None) -> Iterator[Finding]:
    """Yield that NCCL_IB_HCA names one half of a cage: by this host, else by a Spark's names."""
    (row,) = read_env_data("values")["twins"]
    names = [part.partition(":")[0] for part in hca.value.lstrip("=").split(",")]
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
    """Return the RDMA device that is the other half of a device's cage, "" if it is not used."""
    for device in host.rdma if host else ():
        if host and device.name == name:
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
