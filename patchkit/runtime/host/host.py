"""Hold the facts of one machine, as `probe` finds them, and compare its networks."""

import fnmatch
from collections.abc import Collection, Iterable, Iterator
from ipaddress import IPv4Interface, IPv4Network, ip_address, ip_network
from itertools import product
from pathlib import Path
from typing import Literal

from patchkit.frozen import Texts, Values, frozen
from patchkit.runtime.rules.releases import read_env_data
from patchkit.target import targets

OTHER = "other"
"""The target of a machine without a GPU, or with one that patchkit does not know."""

TwinState = Literal[
    "none", "down", "bare", "bare-first", "random", "link-local", "both"
]
"""How the other half of a netdev's cage is addressed; ``twin_state`` explains the values."""

_RENAMED = {"10.1": "11.0"}  # Thor's capability, as CUDA 12.9 had it


@frozen
class Address:
    """An address of a netdev; ``family`` inet or inet6, ``link_local`` for 169.254/16 and fe80."""

    address: str
    prefix: int
    family: str
    link_local: bool


@frozen
class Netdev:
    """A network interface.

    ``state`` is operstate. ``speed`` is in Mbit/s, None if the driver does not say. ``pci`` is like
    ``0000:01:00.0``, "" for a virtual interface, whose ``driver`` is its kind (``bridge``).
    ``port`` is phys_port_name (``p0``). ``cage`` is the number of its QSFP cage, ``twin`` the
    interface of the other half of the cage. ``lanes`` is the width of the PCIe link, None if
    unknown. ``master`` is the bond, bridge or team that has the addresses in its place.
    """

    name: str
    state: str
    carrier: bool
    mtu: int
    speed: int | None
    mac: str
    driver: str
    pci: str
    port: str
    kind: str  # ethernet, wifi, virtual or loopback
    addresses: tuple[Address, ...]
    cage: int | None = None
    twin: str = ""
    lanes: int | None
    master: str

    @property
    def up(self) -> bool:
        # Some drivers leave operstate at unknown: then the carrier decides.
        return self.state == "up" or (self.state == "unknown" and self.carrier)

    @property
    def linked(self) -> bool:
        """Return whether packets can leave: it is up, and has a carrier."""
        return self.up and self.carrier

    @property
    def link_state(self) -> str:
        carrier = "a" if self.carrier else "no"
        return f"{self.state}, {carrier} carrier"

    @property
    def ipv4(self) -> tuple[IPv4Interface, ...]:
        """Return its IPv4 addresses with their prefixes."""
        return tuple(
            IPv4Interface(f"{address.address}/{address.prefix}")
            for address in self.addresses
            if address.family == "inet"
        )

    @property
    def ips(self) -> list[str]:
        """Return the IPv4 addresses as texts, without their prefixes."""
        return [str(interface.ip) for interface in self.ipv4]

    @property
    def networks(self) -> list[IPv4Network]:
        return [interface.network for interface in self.ipv4]

    @property
    def lasting(self) -> tuple[IPv4Interface, ...]:
        """Return the IPv4 addresses without link-local ones, which change at each boot."""
        return tuple(address for address in self.ipv4 if not address.is_link_local)


@frozen
class Gid:
    """An entry of the GID table of an RDMA port; ``address`` is the IPv4 address in it, or ""."""

    index: int
    kind: str  # as sysfs has it: "RoCE v2", "IB/RoCE v1"
    address: str


@frozen
class Rdma:
    """Port 1 of an RDMA device.

    ``cage`` is the number of its QSFP cage, None for none; ``twin`` is the RDMA device of the other
    half of the cage.
    """

    name: str
    state: str
    netdev: str
    pci: str
    cage: int | None = None
    twin: str = ""
    gids: tuple[Gid, ...]

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"

    def gid_of(self, addresses: Collection[str]) -> Gid | None:
        """Return the first RoCE v2 GID of one of these IPv4 addresses."""
        for gid in self.gids:
            if gid.kind == "RoCE v2" and gid.address in addresses:
                return gid
        return None


@frozen
class Gpu:
    """``capability`` like ``12.1``; ``memory`` in MiB, None where NVML does not say (GB10)."""

    name: str
    capability: str = ""
    driver: str = ""
    memory: int | None = None
    bus: str = ""

    @property
    def target(self) -> str:
        """Return the target with this capability; ``other`` for an unknown one."""
        capability = _RENAMED.get(self.capability, self.capability)
        for target in targets().values():
            if "{}.{}".format(*target.capability) == capability:
                return target.name
        return OTHER


@frozen
class Memory:
    """/proc/meminfo, in KiB; ``cma_total`` and ``cma_free`` are None where it has no such lines."""

    total: int
    available: int
    swap_total: int = 0
    cma_total: int | None = None
    cma_free: int | None = None


@frozen
class System:
    """Facts of DMI and the kernel, "" if unknown; ``kho`` is that option of its command line."""

    hostname: str = ""
    vendor: str = ""
    product: str = ""
    bios: str = ""
    bios_date: str = ""
    kernel: str = ""
    kho: str = ""
    os: str = ""
    machine: str = ""
    cpu: str = ""
    cores: int = 0


@frozen
class Nccl:
    """The libnccl that torch or vLLM would load, and why this one; ``path`` is "" for none."""

    path: str
    version: str
    why: str


@frozen
class FlashInfer:
    """FlashInfer in one Python: its compiled modules, and the ``facts`` that advice depends on.

    ``home`` is the package's folder, "" if it is not beside its metadata.
    """

    version: str
    modules: Texts
    facts: Values
    home: str = ""

    def has(self, pattern: str) -> bool:
        """Return whether a module need not be compiled."""
        return bool(fnmatch.filter(self.modules, pattern))


@frozen
class Software:
    """Versions in one Python, "" for none; ``vllm_home`` is vLLM's folder, ``cuda`` is torch's."""

    python: str
    vllm: str = ""
    torch: str = ""
    triton: str = ""
    transformers: str = ""
    ray: str = ""
    cuda: str = ""
    vllm_home: str = ""
    torch_nccl: Nccl | None = None
    vllm_nccl: Nccl | None = None
    flashinfer: FlashInfer | None = None


@frozen
class Host:
    """All facts of a machine; ``notes`` says what could not be read, and why."""

    system: System
    memory: Memory | None
    gpus: tuple[Gpu, ...]
    netdevs: tuple[Netdev, ...]
    rdma: tuple[Rdma, ...]
    software: Software | None = None
    notes: Texts = ()

    @property
    def cabled(self) -> tuple[int, ...]:
        """Return the numbers of the cages in which a netdev has a carrier."""
        lit = {netdev.cage for netdev in self.netdevs if netdev.carrier}
        return tuple(sorted(cage for cage in lit if cage is not None))

    @property
    def addresses(self) -> list[str]:
        """Return its IPv4 addresses, without those of the loopback."""
        ips = [ip for netdev in self.netdevs for ip in netdev.ips]
        return [ip for ip in ips if not ip.startswith("127.")]

    def has_address(self, address: str) -> bool:
        return self.netdev_of(address) is not None

    def netdev_of(self, address: str) -> Netdev | None:
        """Return the first netdev that has this IPv4 address, None if none has."""
        holders = (netdev for netdev in self.netdevs if address in netdev.ips)
        return next(holders, None)

    def rdma_of(self, netdev: str) -> Rdma | None:
        """Return the RDMA device of a netdev."""
        return next((device for device in self.rdma if device.netdev == netdev), None)

    def netdev(self, name: str) -> Netdev | None:
        return next((netdev for netdev in self.netdevs if netdev.name == name), None)

    def masters(self, netdevs: Iterable[Netdev]) -> tuple[Netdev, ...]:
        """Return the bonds, bridges and teams that these netdevs are parts of."""
        names = {netdev.master for netdev in netdevs}
        return tuple(netdev for netdev in self.netdevs if netdev.name in names)

    @property
    def target(self) -> str:
        """Return the target of the first GPU; ``other`` if it is unknown, or there is none."""
        return self.gpus[0].target if self.gpus else OTHER

    @property
    def versions(self) -> Values:
        """Return the versions that rules depend on, "" if unknown; ``nccl`` is that of torch."""
        software = self.software or Software(python="")
        names = ("vllm", "torch", "triton", "transformers")
        versions = {name: getattr(software, name) for name in names}
        versions["nccl"] = software.torch_nccl.version if software.torch_nccl else ""
        return versions

    def vllm_home(self, version: str) -> Path | None:
        """Return the folder of the installed vLLM, None if it has another version."""
        software = self.software or Software(python="")
        is_same = plain_version(software.vllm) == plain_version(version)
        return Path(software.vllm_home) if software.vllm_home and is_same else None


def plain_version(version: str) -> str:
    """Return a version without its local part: ``2.30.7`` of ``2.30.7+cuda13.0``."""
    return version.partition("+")[0]


@frozen
class Overlap:
    """Two interfaces of one host in one network.

    ``netdev`` has ``address``, ``other`` has ``present``.
    """

    netdev: Netdev
    address: IPv4Interface
    other: Netdev
    present: IPv4Interface


def overlaps(host: Host, names: Collection[str]) -> Iterator[Overlap]:
    """Yield each pair of a named interface and another one that are in one network.

    Link-local networks and the loopback do not count.
    """
    named = [netdev for netdev in host.netdevs if netdev.name in names]
    others = [
        netdev
        for netdev in host.netdevs
        if netdev.name not in names and netdev.kind != "loopback"
    ]
    for netdev in named:
        for address, other in product(netdev.lasting, others):
            for present in other.lasting:
                if present.network.overlaps(address.network):
                    yield Overlap(
                        netdev=netdev,
                        address=address,
                        other=other,
                        present=present,
                    )


def twin_state(host: Host, netdev: Netdev) -> TwinState:
    """Return how the other half of a netdev's cage is addressed.

    ``none``: there is no other half. ``down``: it is down. ``bare``: it has no IPv4 address;
    ``bare-first``: the same, and it is the first half by PCI address. ``random``: one half has a
    lasting address, the other only link-local ones. ``both``: the other half has a lasting address.
    ``link-local``: it has only link-local addresses, as this half has.
    """
    twin = host.netdev(netdev.twin)
    if twin is None:
        return "none"
    if not twin.up:
        return "down"
    if not twin.ipv4:
        return "bare" if netdev.pci < twin.pci else "bare-first"

    if netdev.ipv4 and bool(netdev.lasting) is not bool(twin.lasting):
        return "random"
    return "both" if twin.lasting else "link-local"


def one_half_fills(speed: int | None) -> bool:
    """Return whether one half of a cage can carry a link of this speed in Mbit/s; None: no."""
    half_gbits = read_env_data("hardware")["connectx"]["half_gbits"]
    return speed is not None and speed <= half_gbits * 1000


def in_reach(netdev: Netdev, address: str) -> list[IPv4Interface]:
    """Return the addresses of a netdev that reach ``address`` without a router.

    They are in the same network, or in the same overlay of hardware.toml.
    """
    target = ip_address(address)
    overlays = map(ip_network, read_env_data("hardware")["overlays"]["networks"])
    with_target = [network for network in overlays if target in network]

    reaching = []
    for interface in netdev.ipv4:
        # A /32 has no other address in its network, but an overlay gives each node a /32.
        is_single = interface.network.prefixlen == interface.max_prefixlen
        if is_single:
            is_near = any(interface.ip in network for network in with_target)
        else:
            is_near = target in interface.network

        if is_near:
            reaching.append(interface)
    return reaching


def describe_addresses(host: Host) -> str:
    """Return ``192.168.100.10 on enp1s0f0np0, …``, without 127.x addresses."""
    places = [f"{ip} on {netdev.name}" for netdev in host.netdevs for ip in netdev.ips]
    shown = [place for place in places if not place.startswith("127.")]
    return ", ".join(shown) or "no IPv4 address"
