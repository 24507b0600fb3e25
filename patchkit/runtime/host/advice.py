"""Find in the facts of a machine what its owner should know; texts and sources are data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from patchkit.errors import HostError
from patchkit.finding import Finding, Level
from patchkit.runtime.host.host import Host, Netdev
from patchkit.runtime.host.networks import one_half_fills, overlaps, twin_state
from patchkit.runtime.rules.releases import read_env_data, within
from patchkit.target import toolkits

# The id of a remark, and what fills its text in.
Facts = Iterator[tuple[str, dict[str, object]]]


def find_remarks(host: Host, verb: str = "probe") -> tuple[Finding, ...]:
    """Return what a verb (probe, env, verify, plan) says, in the order of hardware.toml."""
    # By PCI address: names depend on udev.
    halves = sorted(
        (netdev for netdev in host.netdevs if netdev.cage is not None),
        key=lambda half: half.pci,
    )
    facts = defaultdict(list)
    for name, fields in (
        *_find_on_machine(host, halves),
        *_find_in_cages(host, halves),
    ):
        facts[name].append(fields)

    findings = []
    for entry in read_env_data("hardware")["remark"]:
        if verb == "probe" or verb in entry.get("also", ()):
            findings += [_fill_in(entry, fields) for fields in facts[entry["id"]]]
    return tuple(findings)


def find_remark(host: Host, about: str) -> Finding | None:
    """Return the first remark of this id, None if there is nothing to say."""
    findings = (finding for finding in find_remarks(host) if finding.about == about)
    return next(findings, None)


def _fill_in(entry: Mapping[str, str], fields: Mapping[str, object]) -> Finding:
    return Finding(
        about=entry["id"],
        level=Level(entry["severity"]),
        where=f"cage {fields['cage']}" if "cage" in fields else "",
        what=entry["says"].format_map(fields),
        why=entry["why"].format_map(fields),
        hint=entry.get("hint", "").format_map(fields),
        source=entry["source"],
        kind=HostError,
    )


def _find_on_machine(host: Host, halves: Sequence[Netdev]) -> Facts:
    yield from _check_kernel_reserve(host)
    yield from _check_ptx_driver(host)

    cards = [device for device in host.rdma if device.cage is not None]
    if host.target == "gb10" and not (cards or halves):
        yield "no-connectx", {}
    owned = {device.netdev for device in host.rdma}
    if bare := [half.name for half in halves if half.name not in owned]:
        yield "no-rdma", {"netdevs": ", ".join(bare)}

    for overlap in overlaps(host, {half.name for half in halves if half.up}):
        # The remark same-subnet is about two halves of one cage.
        if overlap.other.cage is None or overlap.other.cage != overlap.netdev.cage:
            yield (
                "shared-network",
                {
                    "netdev": overlap.netdev.name,
                    "address": overlap.address,
                    "other": overlap.other.name,
                    "present": overlap.present,
                },
            )

    drawn = [
        f"{half.name} {interface}"
        for half in halves
        for interface in half.ipv4
        if half.carrier and interface.is_link_local
    ]
    if drawn:
        yield "link-local", {"addresses": ", ".join(drawn)}


def _check_kernel_reserve(host: Host) -> Facts:
    reserve = read_env_data("hardware")["kernel_reserve"]
    kernel = host.system.kernel
    memory = host.memory
    if memory is None or host.system.kho in reserve["kho_off"]:
        return
    if memory.cma_total is None:
        if kernel in reserve["kernels"]:
            yield "kernel-reserve", {"kernel": kernel, "seen": ""}
    elif memory.cma_total == 0 and memory.cma_free:
        seen = f" (CmaTotal 0, CmaFree {memory.cma_free} kB)"
        yield "kernel-reserve", {"kernel": kernel, "seen": seen}


def _check_ptx_driver(host: Host) -> Facts:
    """Yield a driver that loads the machine code of torch's CUDA, and does not compile its PTX."""
    cuda = host.software.cuda if host.software else ""
    drivers = {row.cuda: row.driver for row in toolkits()}
    oldest = toolkits()[0].driver
    needed = (drivers | read_env_data("hardware")["ptx_drivers"]).get(cuda, oldest)
    versions = (gpu.driver for gpu in host.gpus if gpu.driver[:1].isdigit())
    driver = next(versions, "")
    if driver and within(driver, f">={oldest},<{needed}"):
        yield "ptx-driver", {"driver": driver, "cuda": cuda, "needed": needed}


def _find_in_cages(host: Host, halves: Sequence[Netdev]) -> Facts:
    for master in host.masters(halves):
        parts = ", ".join(half.name for half in halves if half.master == master.name)
        yield (
            "part-of-master",
            {
                "netdevs": parts,
                "master": master.name,
                "addresses": ", ".join(map(str, master.ipv4)) or "no IPv4 address",
                "head": str(master.ipv4[0].ip) if master.ipv4 else "ADDRESS",
            },
        )

    right = read_env_data("hardware")["connectx"]["lanes"]
    for half in halves:
        if half.twin and half.lanes is not None and half.lanes < right:
            place = {"cage": half.cage, "netdev": half.name, "pci": half.pci}
            yield "lanes", {"lanes": half.lanes, "right": right, **place}

    for cage in host.cabled:
        members = [half for half in halves if half.cage == cage]
        if not any(half.ipv4 or half.master for half in members):
            yield "no-address", {"netdevs": ", ".join(half.name for half in members)}
        first = members[0]
        for second in members[1:]:
            if second.name == first.twin:
                for name, fields in _compare_halves(host, first, second):
                    yield name, {"cage": cage, **fields}


def _compare_halves(host: Host, first: Netdev, second: Netdev) -> Facts:
    names = {"netdev": first.name, "twin": second.name}
    yield from _compare_with_twin(host, first, second)
    yield from _compare_with_twin(host, second, first)

    state = twin_state(host, first)
    if state == "random":
        drawn, lasting = sorted((first, second), key=lambda half: bool(half.lasting))
        fields = {"address": lasting.lasting[0], "random": drawn.ipv4[0]}
        yield "random-twin", {"netdev": lasting.name, "twin": drawn.name, **fields}

    networks = {interface.network for interface in first.ipv4}
    for interface in second.lasting:
        if interface.network in networks:
            network = interface.network
            yield "same-subnet", {"network": network, "address": interface, **names}
    if first.ipv4 and state == "link-local":
        pair = f"{first.name} {first.ipv4[0]}, {second.name} {second.ipv4[0]}"
        yield "link-local-twins", {"addresses": pair, "twin": second.name}

    are_up = first.up and second.up
    are_known = first.mtu and second.mtu
    if are_up and are_known and first.mtu != second.mtu:
        yield "twin-mtu", {"mtu": first.mtu, "other": second.mtu, **names}


def _compare_with_twin(host: Host, half: Netdev, twin: Netdev) -> Facts:
    """Yield what a half has, and its twin lacks."""
    state = twin_state(host, half)
    names = {"netdev": half.name, "twin": twin.name}
    if half.ipv4 and state in ("bare", "bare-first"):
        fields = {"address": half.ipv4[0], "without": twin.name}
        yield "one-twin-address", {**fields, **names}
    if half.up and not twin.up and not one_half_fills(half.speed):
        yield "half-down", {"state": twin.state, **names}
