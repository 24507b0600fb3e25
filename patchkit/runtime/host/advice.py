"""Find in the facts of a machine what its owner should know; texts and sources are data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from patchkit.errors import HostError
from patchkit.finding import Finding, Level
from patchkit.runtime.host import hardware
from patchkit.runtime.host.host import Host, Netdev
from patchkit.runtime.host.networks import overlaps, twin_state
from patchkit.runtime.host.target import target_of

Found = Iterator[dict[str, object]]


def remarks(host: Host, verb: str = "probe") -> tuple[Finding, ...]:
    """Return what ``probe``, ``env``, ``verify`` or ``plan`` says, in the order of hardware.toml.

    ``where`` is ``cage 0`` for a remark about a cage, else empty.
    """
    return tuple(
        _remark_of(each, fields)
        for each in hardware.facts()["remark"]
        if verb == "probe" or verb in each.get("also", ())
        for fields in _CHECKS[each["id"]](host)
    )


def remark(host: Host, about: str) -> Finding | None:
    """Return the first remark of this id, None if there is nothing to say."""
    return next((each for each in remarks(host) if each.about == about), None)


def cage_name(number: int | None) -> str:
    """Return how remarks name a cage: ``cage 0``."""
    return f"cage {number}"


def _remark_of(entry: Mapping[str, str], fields: Mapping[str, object]) -> Finding:
    return Finding(
        about=entry["id"],
        level=Level(entry["severity"]),
        where=cage_name(number) if isinstance(number := fields.get("cage"), int) else "",
        what=entry["says"].format_map(fields),
        why=entry["why"],
        hint=entry.get("hint", "").format_map(fields),
        source=entry["source"],
        kind=HostError,
    )


def _kernel_reserve(host: Host) -> Found:
    known, memory = hardware.facts()["kernel_reserve"], host.memory
    if host.system.kho in known["kho_off"] or memory is None:
        return
    if memory.cma_total is None:
        taken, seen = host.system.kernel in known["kernels"], ""
    else:
        taken = memory.cma_total == 0 < (memory.cma_free or 0)
        seen = f" (CmaTotal 0, CmaFree {memory.cma_free} kB)"
    if taken:
        yield {"kernel": host.system.kernel, "seen": seen}


def _no_connectx(host: Host) -> Found:
    found = (*(each.cage for each in host.netdevs), *(each.cage for each in host.rdma))
    if target_of(host) == "gb10" and all(cage is None for cage in found):
        yield {}


def _no_rdma(host: Host) -> Found:
    owned = {each.netdev for each in host.rdma}
    bare = [each.name for each in _cage_halves(host) if each.name not in owned]
    if bare:
        yield {"netdevs": ", ".join(bare)}


def _no_address(host: Host) -> Found:
    for pair in _cabled_pairs(host):
        if not any(each.ipv4 for each in pair):
            yield {"netdevs": ", ".join(each.name for each in pair)}


def _shared_network(host: Host) -> Found:
    lit = {each.name for each in _cage_halves(host) if each.up}
    for each in overlaps(host, lit):
        if each.other.cage is None or each.other.cage != each.netdev.cage:
            names = {"netdev": each.netdev.name, "other": each.other.name}
            yield {**names, "address": each.address, "present": each.present}


def _random_twin(host: Host) -> Found:
    for one, other in _twin_pairs(host):
        if twin_state(host, one) == "random":
            lasting, drawn = (one, other) if one.lasting else (other, one)
            names = {"netdev": lasting.name, "twin": drawn.name}
            yield {
                "cage": one.cage,
                "address": lasting.lasting[0],
                "random": drawn.ipv4[0],
                **names,
            }


def _one_twin_address(host: Host) -> Found:
    for one, other in _twin_pairs(host):
        for has, without in ((one, other), (other, one)):
            if has.ipv4 and twin_state(host, has) in ("bare", "bare-first"):
                names = {"netdev": has.name, "without": without.name}
                yield {"cage": one.cage, "address": has.ipv4[0], **names}


def _half_down(host: Host) -> Found:
    for one, other in _twin_pairs(host):
        for has, without in ((one, other), (other, one)):
            if has.up and not without.up and not hardware.one_half_fills(has.speed):
                names = {"netdev": has.name, "twin": without.name}
                yield {"cage": one.cage, "state": without.state, **names}


def _same_subnet(host: Host) -> Found:
    for one, other in _twin_pairs(host):
        first = {each.network for each in one.ipv4}
        for address in other.ipv4:
            # The remark link-local is about link-local ones.
            if address.network in first and not address.is_link_local:
                names = {"netdev": one.name, "twin": other.name, "address": address}
                yield {"cage": one.cage, "network": address.network, **names}


def _twin_mtu(host: Host) -> Found:
    for one, other in _twin_pairs(host):
        if one.up and other.up and one.mtu and other.mtu and one.mtu != other.mtu:
            names = {"netdev": one.name, "twin": other.name}
            yield {"cage": one.cage, "mtu": one.mtu, "other": other.mtu, **names}


def _too_few_lanes(host: Host) -> Found:
    right = hardware.facts()["connectx"]["lanes"]
    for each in _cage_halves(host):
        if each.twin and each.lanes is not None and each.lanes < right:
            names = {"netdev": each.name, "pci": each.pci}
            yield {"cage": each.cage, "lanes": each.lanes, "right": right, **names}


def _link_local(host: Host) -> Found:
    lit = [each for each in _cage_halves(host) if each.carrier]
    found = [f"{each.name} {own}" for each in lit for own in each.ipv4 if own.is_link_local]
    if found:
        yield {"addresses": ", ".join(found)}


def _link_local_twins(host: Host) -> Found:
    for one, other in _twin_pairs(host):
        if one.ipv4 and twin_state(host, one) == "link-local":
            found = f"{one.name} {one.ipv4[0]}, {other.name} {other.ipv4[0]}"
            yield {"cage": one.cage, "addresses": found, "twin": other.name}


def _mlx5_names(host: Host) -> Found:
    names = [each.name for each in host.rdma if each.twin and each.name.startswith("mlx5_")]
    if names:
        yield {"names": ", ".join(names)}


def _cage_speed(host: Host) -> Found:
    for one, other in _twin_pairs(host):
        if one.speed and one.speed == other.speed:
            yield {"cage": one.cage, "speed": one.speed // 1000}


_CHECKS: dict[str, Callable[[Host], Found]] = {
    "kernel-reserve": _kernel_reserve,
    "no-connectx": _no_connectx,
    "no-rdma": _no_rdma,
    "no-address": _no_address,
    "shared-network": _shared_network,
    "random-twin": _random_twin,
    "one-twin-address": _one_twin_address,
    "half-down": _half_down,
    "same-subnet": _same_subnet,
    "twin-mtu": _twin_mtu,
    "lanes": _too_few_lanes,
    "link-local": _link_local,
    "link-local-twins": _link_local_twins,
    "renamed": _mlx5_names,
    "rate": _cage_speed,
}


def _cage_halves(host: Host) -> list[Netdev]:
    """Return the halves of cages by PCI address: names depend on udev."""
    halves = (each for each in host.netdevs if each.cage is not None)
    return sorted(halves, key=lambda each: each.pci)


def _cabled_pairs(host: Host) -> Iterator[tuple[Netdev, ...]]:
    """Yield the netdevs of each cage that has a cable."""
    for cage in host.cabled:
        yield tuple(each for each in _cage_halves(host) if each.cage == cage)


def _twin_pairs(host: Host) -> Iterator[tuple[Netdev, Netdev]]:
    """Yield the two halves of each cage that has a cable."""
    for one, *others in _cabled_pairs(host):
        yield from ((one, other) for other in others if one.twin == other.name)
