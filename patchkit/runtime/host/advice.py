"""Find remarks for the owner of a machine in its facts; texts and sources are data."""

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from patchkit.errors import HostError
from patchkit.finding import Finding, Level, fill_texts
from patchkit.frozen import Fields, Values
from patchkit.runtime.host.host import (
    Host,
    Netdev,
    one_half_fills,
    overlaps,
    twin_state,
)
from patchkit.runtime.rules.releases import read_env_data, within
from patchkit.target import toolkits

Halves = Sequence[Netdev]

Facts = Iterator[tuple[str, Fields]]
"""Remarks: the id of each one in hardware.toml, and the fields for its texts."""


def find_remarks(
    host: Host,
    verb: str = "probe",
    cages: Iterable[int | None] | None = None,
) -> list[Finding]:
    """Return the remarks that a verb prints (probe, env, verify, plan), in hardware.toml's order.

    ``cages`` are the numbers of the cages to judge: remarks about other cages are left out. With
    None no remark is left out.
    """
    # By PCI address: names depend on udev.
    halves = [netdev for netdev in host.netdevs if netdev.cage is not None]
    halves.sort(key=attrgetter("pci"))

    facts = [fact for check in _CHECKS for fact in check(host, halves)]

    findings = []
    for entry in read_env_data("hardware")["remark"]:
        if verb == "probe" or verb in entry.get("also", ()):
            about = entry["id"]
            findings += [_fill_in(entry, row) for name, row in facts if name == about]
    if cages is None:
        return findings

    places = {f"cage {cage}" for cage in cages} | {""}
    return [finding for finding in findings if finding.where in places]


def find_remark(host: Host, about: str) -> Finding | None:
    """Return the first remark with the id ``about``, None if it does not apply to the host."""
    findings = (finding for finding in find_remarks(host) if finding.about == about)
    return next(findings, None)


def _fill_in(entry: Values, fields: Fields) -> Finding:
    return Finding(
        about=entry["id"],
        level=Level(entry["level"]),
        where=f"cage {fields['cage']}" if "cage" in fields else "",
        kind=HostError,
        **fill_texts(entry, fields),
    )


def _check_kernel_reserve(host: Host, _halves: Halves) -> Facts:
    reserve = read_env_data("hardware")["kernel_reserve"]
    kernel = host.system.kernel
    memory = host.memory
    if memory is None or host.system.kho in reserve["kho_off"]:
        return

    if memory.cma_total is None:
        if kernel in reserve["kernels"]:
            yield "kernel-reserve", {"kernel": kernel, "seen": ""}
    elif memory.cma_total == 0 and memory.cma_free:
        counted = f" (CmaTotal 0, CmaFree {memory.cma_free} kB)"
        yield "kernel-reserve", {"kernel": kernel, "seen": counted}


def _check_ptx_driver(host: Host, _halves: Halves) -> Facts:
    """Yield a driver that loads the machine code of torch's CUDA but cannot compile its PTX."""
    cuda = host.software.cuda if host.software else ""
    drivers = {row.cuda: row.driver for row in toolkits()}
    drivers |= read_env_data("hardware")["ptx_drivers"]
    oldest = toolkits()[0].driver
    needed = drivers.get(cuda, oldest)

    versions = (gpu.driver for gpu in host.gpus if gpu.driver[:1].isdigit())
    driver = next(versions, "")
    if driver and within(driver, f">={oldest},<{needed}"):
        yield "ptx-driver", {"driver": driver, "cuda": cuda, "needed": needed}


def _check_devices(host: Host, halves: Halves) -> Facts:
    cages = {device.cage for device in host.rdma} - {None}
    if host.target == "gb10" and not (cages or halves):
        yield "no-connectx", {}
    yield host.target, {}  # what is to be said of the device itself

    rdma_names = {device.netdev for device in host.rdma}
    bare = [half.name for half in halves if half.name not in rdma_names]
    if bare:
        yield "no-rdma", {"netdevs": ", ".join(bare)}


def _check_networks(host: Host, halves: Halves) -> Facts:
    names = {half.name for half in halves if half.up}
    for overlap in overlaps(host, names):
        # The remark same-subnet is about two halves of one cage.
        cage = overlap.other.cage
        if cage is None or cage != overlap.netdev.cage:
            yield "shared-network", {"overlap": overlap}


def _check_masters(host: Host, halves: Halves) -> Facts:
    for master in host.masters(halves):
        parts = [half.name for half in halves if half.master == master.name]
        fields = {
            "netdevs": ", ".join(parts),
            "master": master.name,
            "addresses": ", ".join(map(str, master.ipv4)) or "no IPv4 address",
            "head": next(iter(master.ips), "ADDRESS"),
        }
        yield "part-of-master", fields


def _check_lanes(_host: Host, halves: Halves) -> Facts:
    right = read_env_data("hardware")["connectx"]["lanes"]
    for half in halves:
        lanes = half.lanes or right
        if half.twin and lanes < right:
            yield "lanes", {"cage": half.cage, "half": half, "right": right}


def _check_cages(host: Host, halves: Halves) -> Facts:
    for cage in host.cabled:
        members = [half for half in halves if half.cage == cage]
        names = ", ".join(half.name for half in members)
        if not any(half.ipv4 or half.master for half in members):
            yield "no-address", {"netdevs": names}

        twin = host.netdev(members[0].twin)
        if twin:
            for name, fields in _compare_halves(host, members[0], twin):
                yield name, {"cage": cage, **fields}


_CHECKS = (
    _check_kernel_reserve,
    _check_ptx_driver,
    _check_devices,
    _check_networks,
    _check_masters,
    _check_lanes,
    _check_cages,
)


def _compare_halves(host: Host, first: Netdev, second: Netdev) -> Facts:
    yield from _compare_with_twin(host, first, second)
    yield from _compare_with_twin(host, second, first)

    state = twin_state(host, first)
    if state == "random":
        drawn, lasting = (second, first) if first.lasting else (first, second)
        yield "random-twin", {"half": lasting, "twin": drawn}
    elif first.ipv4 and state == "link-local":
        yield "link-local-twins", {"half": first, "twin": second}

    for address in second.lasting:
        if address.network in first.networks:
            yield "same-subnet", {"half": first, "twin": second, "address": address}

    mtus = {first.mtu, second.mtu}
    if first.up and second.up and len(mtus) == 2 and 0 not in mtus:
        yield "twin-mtu", {"half": first, "twin": second}


def _compare_with_twin(host: Host, half: Netdev, twin: Netdev) -> Facts:
    """Yield that a half has an address, or a link, and its twin has none."""
    is_bare = twin_state(host, half) in ("bare", "bare-first")
    if half.ipv4 and is_bare:
        yield "one-twin-address", {"half": half, "twin": twin}

    if half.up and not twin.up and not one_half_fills(half.speed):
        yield "half-down", {"half": half, "twin": twin}
