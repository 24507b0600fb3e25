"""Say what carries control and data of a node in each topology, and what to know of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from patchkit.runtime.host import hardware
from patchkit.runtime.host.host import Host, Netdev, Rdma
from patchkit.runtime.host.networks import TwinState, twin_state
from patchkit.runtime.node.address import OwnAddress, devices_of, usable_rdma


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """``address`` and ``netdev`` are this node's own, empty for a node alone.

    ``data`` is the interface that carries the data, ``netdevs`` are all that do by TCP; ``hcas``
    are the RDMA devices in NCCL's syntax, ``half`` the one behind ``data`` alone. ``twin`` is how
    its other half is addressed, ``cages`` are those that are used, ``notes`` what a user should
    know about the choice.
    """

    topology: str
    address: str = ""
    netdev: str = ""
    data: str = ""
    netdevs: tuple[str, ...] = ()
    hcas: str = ""
    half: str = ""
    twin: TwinState | Literal[""] = ""
    cages: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def _roce(host: Host, own: OwnAddress, nodes: int, devices: Sequence[Rdma]) -> Attachment:
    # The control may go over another interface than the data, such as the LAN's.
    device = next((each for each in devices if each.netdev == own.netdev.name), devices[0])
    netdev = host.netdev(device.netdev) or own.netdev
    twin = next((each for each in host.rdma if each.name == device.twin), None)
    state: TwinState = twin_state(host, netdev)
    if twin is None:
        state = "none"
    elif not twin.active:
        state = "down"
    cage = sorted(filter(None, (device, twin)), key=lambda each: (each.pci, each.name))
    both = [each for each in cage if each is device or state not in ("none", "down")]
    addressed = [each.netdev for each in both if state in ("both", "link-local") or each is device]
    hcas = _exact(host, [each.name for each in both])
    return Attachment(
        topology="roce",
        data=device.netdev,
        netdevs=tuple(addressed),
        hcas=hcas,
        half=_exact(host, [device.name]),
        twin=state,
        cages=_cages([device]),
        notes=(
            *_apart(own, device),
            *_about_twin(device, twin, netdev, state),
            *_about_others(host, device, nodes),
        ),
    )


def _apart(own: OwnAddress, device: Rdma) -> Iterator[str]:
    if own.netdev.name != device.netdev:
        yield (
            f"{own.netdev.name} carries the control, the cable behind {device.netdev} the data; "
            "sockets for both, on every node: --topology socket"
        )


def _about_twin(device: Rdma, twin: Rdma | None, netdev: Netdev, state: TwinState) -> Iterator[str]:
    if twin is None:
        yield f"{device.name} has no second half here: about half of the cable's bandwidth"
    elif state == "down":
        full = hardware.one_half_fills(netdev.speed)
        cost = "" if full else "; that costs half of the bandwidth"
        seen = twin.state or "of unknown state"
        yield f"{twin.name}, a half of the cable, is left out: it is {seen}{cost}"


def _about_others(host: Host, device: Rdma, nodes: int) -> Iterator[str]:
    others = [each.name for each in usable_rdma(host) if each.cage != device.cage]
    if others:
        why = (
            "between two nodes one cable carries all that the ConnectX-7 can"
            if nodes == 2
            else f"all {nodes} nodes are reached over {device.netdev}"
        )
        yield f"{', '.join(others)} {'is' if len(others) == 1 else 'are'} not used: {why}"


def _ring(host: Host, own: OwnAddress, nodes: int, _devices: Sequence[Rdma]) -> Attachment:
    usable = [each for each in usable_rdma(host) if not _is_random(host, each)]
    notes = [f"{own.netdev.name} carries the bootstrap, the cables carry the data"]
    if nodes == 3:  # luxingcom/aicad-nccl-optimization
        notes.append("in a ring of three each cable must join a port 0 with a port 1")
    if len(_cages(usable)) < 2:
        notes.append(f"a ring uses both cages of every node; here: {devices_of(host)}")
    return Attachment(
        topology="ring",
        data=own.netdev.name,
        netdevs=(own.netdev.name,),
        hcas=_exact(host, [each.name for each in usable]),
        cages=_cages(usable),
        notes=tuple(notes),
    )


def _is_random(host: Host, device: Rdma) -> bool:
    """Return whether a device has a random address, and its twin a lasting one."""
    netdev = host.netdev(device.netdev)
    return bool(netdev and not netdev.lasting and twin_state(host, netdev) == "random")


def _socket(host: Host, own: OwnAddress, _nodes: int, _devices: Sequence[Rdma]) -> Attachment:
    # TCP can use both halves of a cage, as RDMA does.
    both = own.netdev.twin and twin_state(host, own.netdev) in ("both", "link-local")
    usable = usable_rdma(host)
    notes = []
    if not usable:
        notes.append(f"sockets, since no RDMA device is usable here: {devices_of(host)}")
    elif own.netdev.name not in (each.netdev for each in usable):
        fast = ", ".join(f"{each.name} on {each.netdev}" for each in usable)
        notes.append(f"sockets, as asked for; RoCE could use {fast}: --topology roce")
    return Attachment(
        topology="socket",
        data=own.netdev.name,
        netdevs=(own.netdev.name, *([own.netdev.twin] if both else [])),
        cages=tuple(each for each in [own.netdev.cage] if each is not None),
        notes=tuple(notes),
    )


def _hetero(_host: Host, own: OwnAddress, _nodes: int, _devices: Sequence[Rdma]) -> Attachment:
    """Return one interface: a Thor has no RDMA."""
    return Attachment(topology="hetero", data=own.netdev.name, netdevs=(own.netdev.name,))


WAYS: Mapping[str, Callable[[Host, OwnAddress, int, Sequence[Rdma]], Attachment]] = {
    "roce": _roce,
    "ring": _ring,
    "socket": _socket,
    "hetero": _hetero,
}


def _cages(devices: Iterable[Rdma]) -> tuple[int, ...]:
    return tuple(sorted({each.cage for each in devices if each.cage is not None}))


def _exact(host: Host, names: Sequence[str]) -> str:
    """Return names for NCCL, which takes prefixes; ``=`` makes them exact where that matters."""
    others = [each.name for each in host.rdma if each.name not in names]
    exact = any(other.startswith(tuple(names)) for other in others)
    return ("=" if exact else "") + ",".join(names)
