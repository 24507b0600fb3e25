"""Hold the facts of one machine, as `probe` finds them."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Interface, IPv4Network
from pathlib import Path

from patchkit.frozen import frozen
from patchkit.target import targets

OTHER = "other"
"""The target of a machine without a GPU, or with one that patchkit does not know."""

_RENAMED = {"10.1": "11.0"}  # Thor's capability, as CUDA 12.9 had it


@frozen
class Address:
    """An address of a netdev; ``family`` inet or inet6, ``link_local`` for 169.254/16 and fe80."""

    address: str
    prefix: int
    family: str
    link_local: bool = False


@frozen
class Netdev:
    """A network interface.

    ``state`` is operstate; ``speed`` in Mbit/s, None if the driver does not say; ``pci`` like
    ``0000:01:00.0``, empty for a virtual one; ``port`` is phys_port_name (``p0``), empty if none;
    ``driver`` of a virtual one is its kind (``bridge``). ``cage`` and ``twin`` are as of Rdma, with
    a netdev as the twin; ``lanes`` is the width of the PCIe link, None where sysfs has none.
    ``master`` is the bond, bridge or team that it is a part of: that has the addresses.
    """

    name: str
    state: str
    carrier: bool
    mtu: int
    speed: int | None = None
    mac: str = ""
    driver: str = ""
    pci: str = ""
    port: str = ""
    kind: str = "ethernet"  # ethernet, wifi, virtual or loopback
    addresses: tuple[Address, ...] = ()
    cage: int | None = None
    twin: str = ""
    lanes: int | None = None
    master: str = ""

    @property
    def up(self) -> bool:
        # Some drivers leave operstate at unknown: then the carrier decides.
        return self.state == "up" or (self.state == "unknown" and self.carrier)

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
        """Return the IPv4 addresses that are not link-local: those are drawn anew at each boot."""
        return tuple(address for address in self.ipv4 if not address.is_link_local)


@frozen
class Gid:
    """An entry of an RDMA port's GID table; ``address`` is the IPv4 mapped in, empty if none."""

    index: int
    kind: str  # as sysfs has it: "RoCE v2", "IB/RoCE v1"
    address: str = ""


@frozen
class Rdma:
    """Port 1 of an RDMA device, with its cage and the other half of it; "" or None for none."""

    name: str
    state: str
    netdev: str = ""
    pci: str = ""
    cage: int | None = None
    twin: str = ""
    gids: tuple[Gid, ...] = ()

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"


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
    """DMI and kernel; empty where unknown. ``kho`` is the value of that option of the kernel's."""

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
    """The libnccl that torch or vLLM would load, and why; ``path`` is empty for none."""

    path: str
    version: str
    why: str


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


@frozen
class Host:
    """All facts of a machine; ``notes`` says what could not be read, and why."""

    system: System
    memory: Memory | None
    gpus: tuple[Gpu, ...]
    netdevs: tuple[Netdev, ...]
    rdma: tuple[Rdma, ...]
    software: Software | None = None
    notes: tuple[str, ...] = ()

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
        """Return the first netdev that has an IPv4 address."""
        holders = (netdev for netdev in self.netdevs if address in netdev.ips)
        return next(holders, None)

    def netdev(self, name: str) -> Netdev | None:
        return next((netdev for netdev in self.netdevs if netdev.name == name), None)

    def masters(self, netdevs: Iterable[Netdev]) -> tuple[Netdev, ...]:
        """Return the bonds, bridges and teams of which some netdevs are parts."""
        names = {netdev.master for netdev in netdevs}
        return tuple(netdev for netdev in self.netdevs if netdev.name in names)

    @property
    def target(self) -> str:
        """Return the target by the GPU's capability; ``other`` for an unknown one, or none."""
        return self.gpus[0].target if self.gpus else OTHER

    @property
    def versions(self) -> dict[str, str]:
        """Return the versions that rules depend on, NCCL's is torch's; "" where unknown."""
        software = self.software or Software(python="")
        names = ("vllm", "torch", "triton", "transformers")
        versions = {name: getattr(software, name) for name in names}
        versions["nccl"] = software.torch_nccl.version if software.torch_nccl else ""
        return versions

    def vllm_home(self, version: str) -> Path | None:
        """Return the folder of the installed vLLM, if it is of this version."""
        software = self.software or Software(python="")
        is_same = plain_version(software.vllm) == plain_version(version)
        return Path(software.vllm_home) if software.vllm_home and is_same else None


def plain_version(version: str) -> str:
    """Return a version without its local part: ``2.30.7`` of ``2.30.7+cuda13.0``."""
    return version.partition("+")[0]
