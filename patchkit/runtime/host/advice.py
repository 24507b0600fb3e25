"""Find in the facts of a machine what its owner should know; texts and sources are data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from patchkit.errors import HostError
from patchkit.finding import Finding, Level
from patchkit.runtime.host.host import Host, Netdev
from patchkit.runtime.host.networks import one_half_fills, overlaps, twin_state
from patchkit.runtime.rules.releases import read_env_data, within
from patchkit.target import toolkits

# The id of a remark, and what fills its text in.
Facts = Iterator[tuple[str, dict[str, object]]]


def remarks(host: Host, verb: str = "probe") -> tuple[Finding, ...]:
    """Return what a verb (probe, env, verify, plan) says, in the order of hardware.toml."""
    found = defaultdict(list)
    # By PCI address: names depend on udev.
    halves = sorted(
        (netdev for netdev in host.netdevs if netdev.cage is not None),
        key=lambda half: half.pci,
    )
    for name, fields in (
        *_find_on_machine(host, halves),
        *_find_in_cages(host, halves),
    ):
        found[name].append(fields)
    return tuple(
        Finding(
            about=entry["id"],
            level=Level(entry["severity"]),
            where=f"cage {number}"
            if isinstance(number := fields.get("cage"), int)
            else "",
            what=entry["says"].format_map(fields),
            why=entry["why"].format_map(fields),
            hint=entry.get("hint", "").format_map(fields),
            source=entry["source"],
            kind=HostError,
        )
        for entry in read_env_data("hardware")["remark"]
        if verb == "probe" or verb in entry.get("also", ())
        for fields in found[entry["id"]]
    )


def remark(host: Host, about: str) -> Finding | None:
    """Return the first remark of this id, None if there is nothing to say."""
    return next((finding for finding in remarks(host) if finding.about == about), None)


def _find_on_machine(host: Host, halves: Sequence[Netdev]) -> Facts:
    known, memory = read_env_data("hardware")["kernel_reserve"], host.memory
    if memory and host.system.kho not in known["kho_off"]:
        taken, counted = host.system.kernel in known["kernels"], ""
        if memory.cma_total is not None:
            taken = memory.cma_total == 0 < (memory.cma_free or 0)
            counted = f" (CmaTotal 0, CmaFree {memory.cma_free} kB)"
        if taken:
            yield "kernel-reserve", {"kernel": host.system.kernel, "seen": counted}
    owned = {device.netdev for device in host.rdma}
    cards = any(device.cage is not None for device in host.rdma) or halves
    if not cards and host.target == "gb10":
        yield "no-connectx", {}
    if bare := [half.name for half in halves if half.name not in owned]:
        yield "no-rdma", {"netdevs": ", ".join(bare)}
    for found in overlaps(host, {half.name for half in halves if half.up}):
        if found.other.cage is None or found.other.cage != found.netdev.cage:
            names = {"netdev": found.netdev.name, "other": found.other.name}
            yield (
                "shared-network",
                {**names, "address": found.address, "present": found.present},
            )
    pairs = [(half, own) for half in halves if half.carrier for own in half.ipv4]
    if drawn := [f"{half.name} {own}" for half, own in pairs if own.is_link_local]:
        yield "link-local", {"addresses": ", ".join(drawn)}
    # Such a driver loads the machine code of torch's CUDA, and does not compile its PTX.
    cuda, oldest = host.software.cuda if host.software else "", toolkits()[0]
    needed = {row.cuda: row.driver for row in toolkits()} | read_env_data("hardware")[
        "ptx_drivers"
    ]
    driver = next((gpu.driver for gpu in host.gpus if gpu.driver[:1].isdigit()), "")
    if driver and within(
        driver, f">={oldest.driver},<{needed.get(cuda, oldest.driver)}"
    ):
        yield "ptx-driver", {"driver": driver, "cuda": cuda, "needed": needed[cuda]}


def _find_in_cages(host: Host, halves: Sequence[Netdev]) -> Facts:
    right = read_env_data("hardware")["connectx"]["lanes"]
    for master in host.masters(halves):
        parts = ", ".join(half.name for half in halves if half.master == master.name)
        addresses = ", ".join(map(str, master.ipv4)) or "no IPv4 address"
        head = str(master.ipv4[0].ip) if master.ipv4 else "ADDRESS"
        names = {"netdevs": parts, "master": master.name}
        yield "part-of-master", {**names, "addresses": addresses, "head": head}
    for half in halves:
        if half.twin and half.lanes is not None and half.lanes < right:
            place = {"cage": half.cage, "netdev": half.name, "pci": half.pci}
            yield "lanes", {"lanes": half.lanes, "right": right, **place}
    for cage in host.cabled:
        one, *others = (half for half in halves if half.cage == cage)
        if not any(half.ipv4 or half.master for half in (one, *others)):
            yield (
                "no-address",
                {"netdevs": ", ".join(half.name for half in (one, *others))},
            )
        for other in (half for half in others if half.name == one.twin):
            for name, fields in _compare_halves(host, one, other):
                yield name, {"cage": cage, **fields}


def _compare_halves(host: Host, one: Netdev, other: Netdev) -> Facts:
    names, state = {"netdev": one.name, "twin": other.name}, twin_state(host, one)
    for has, lacks in ((one, other), (other, one)):
        if has.ipv4 and twin_state(host, has) in ("bare", "bare-first"):
            fields = {"netdev": has.name, "without": lacks.name}
            yield "one-twin-address", {"address": has.ipv4[0], **fields}
        if has.up and not lacks.up and not one_half_fills(has.speed):
            yield (
                "half-down",
                {"netdev": has.name, "twin": lacks.name, "state": lacks.state},
            )
    if state == "random":
        lasting, drawn = (one, other) if one.lasting else (other, one)
        fields = {"netdev": lasting.name, "twin": drawn.name}
        yield (
            "random-twin",
            {"address": lasting.lasting[0], "random": drawn.ipv4[0], **fields},
        )
    for own in other.ipv4:
        # The remark link-local is about link-local ones.
        if own.network in {its.network for its in one.ipv4} and not own.is_link_local:
            yield "same-subnet", {"network": own.network, "address": own, **names}
    if one.ipv4 and state == "link-local":
        pair = f"{one.name} {one.ipv4[0]}, {other.name} {other.ipv4[0]}"
        yield "link-local-twins", {"addresses": pair, "twin": other.name}
    if one.up and other.up and one.mtu and other.mtu and one.mtu != other.mtu:
        yield "twin-mtu", {"mtu": one.mtu, "other": other.mtu, **names}
