"""Try how this node reaches others: by ssh with its own configuration, and on the cable."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from patchkit.cluster.ssh.ssh import (
    check_destination,
    error_fields,
    ssh_error,
    ssh_words,
)
from patchkit.foreign import read_json
from patchkit.process import attempt

HEADERS = 28
"""Bytes of IPv4 (20) and ICMP (8), which an MTU has less for the payload."""

_PLAIN = 56  # bytes of payload, as ping itself sends
# Three packets; ping's status is 0 for answers, 1 for none, 2 for an error.
_UNFRAGMENTED = ("-4", "-n", "-c", "3", "-i", "0.2", "-W", "1", "-M", "do")
_STANDARD_PORT = "22"
# A link has a connection to itself: one that others share may hang behind a cable that was out.
_OF_A_LINK = (
    *("-o", "ConnectTimeout=5"),
    *("-o", "ControlMaster=no"),
    *("-o", "ControlPath=none"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLink:
    """``words`` lead from the head to a worker; ``error`` holds the fields of one, {} for none."""

    words: tuple[str, ...]
    error: dict[str, str]


def try_links(peers: Sequence[tuple[str, str]]) -> list[PeerLink]:
    """Return the link to each peer, ``(DESTINATION, ADDRESS ON THE CABLE)``, tried as a unit would.

    A unit has no agent of a login: the key must work without one. Without an address ssh's own way
    is taken. The host key is looked for where ssh has it for the destination, whatever the address.
    """
    environment = {
        key: value for key, value in os.environ.items() if key != "SSH_AUTH_SOCK"
    }
    found = []
    for destination, address in peers:
        check_destination(destination)
        said = attempt("ssh", "-G", "--", destination).output.split("\n")
        here = dict(line.partition(" ")[::2] for line in said)
        name, port = here.get("hostname", destination), here.get("port", _STANDARD_PORT)
        over_cable: tuple[str, ...] = ()
        if address and address != name:
            known = name if port == _STANDARD_PORT else f"[{name}]:{port}"
            over_cable = (
                *("-o", f"HostName={address}"),
                *("-o", f"HostKeyAlias={here.get('hostkeyalias') or known}"),
                *("-o", "CheckHostIP=no"),
                # Of a jump host the cable has no need.
                *("-o", "ProxyJump=none"),
                *("-o", "ProxyCommand=none"),
            )
        words = ssh_words(destination, *_OF_A_LINK, *over_cable)
        done = attempt(*words, "true", env=environment, timeout=30)
        error = ssh_error(done, destination) if done.trouble else None
        found.append(PeerLink(words=words, error=error_fields(error) if error else {}))
    return found


CHOSEN_PORT = 47001
"""A port as the system chooses them for torch, gloo and NCCL, where nobody is to listen."""

_CONNECT_SECONDS = 4.0  # in which TCP asks three times


def try_ports(addresses: Sequence[str], port: int) -> list[str]:
    """Return what keeps this node from a TCP port of each address, "" for nothing.

    A port where nobody listens is refused at once: only a firewall is silent, or says more.
    """

    def connect(address: str) -> str:
        try:
            socket.create_connection((address, port), _CONNECT_SECONDS).close()
        except ConnectionRefusedError:
            pass
        except OSError as error:
            return error.strerror or str(error)
        return ""

    with ThreadPoolExecutor(max_workers=max(len(addresses), 1)) as pool:
        return list(pool.map(connect, addresses))


Echo = Literal["answers", "silent", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The way to one address: through which interface the kernel sends, and what came back.

    ``mtu`` is the interface's, 0 if unknown; ``full`` is an echo of frames of that size, ``said``
    what ping or ip wrote about it, or why it was not tried.
    """

    address: str
    netdev: str = ""
    gateway: str = ""
    mtu: int = 0
    plain: Echo = "unknown"
    full: Echo = "unknown"
    said: str = ""


def try_ways(addresses: Sequence[str]) -> list[Way]:
    """Return the way to each address, tried side by side."""
    with ThreadPoolExecutor(max_workers=max(len(addresses), 1)) as pool:
        return list(pool.map(_try_way, addresses))


def _try_way(address: str) -> Way:
    done = attempt("ip", "-json", "route", "get", address, timeout=5)
    try:
        (route,) = read_json(done.output)
        netdev, gateway = str(route["dev"]), str(route.get("gateway", ""))
    except (ValueError, TypeError, KeyError, AttributeError):
        return Way(
            address=address, said=done.trouble or "ip says nothing about the route"
        )
    mtu = 0
    with contextlib.suppress(OSError, ValueError):
        mtu = int(Path("/sys/class/net", netdev, "mtu").read_text(encoding="ascii"))
    way = Way(address=address, netdev=netdev, gateway=gateway, mtu=mtu)
    # Only iputils' ping forbids fragments by -M do.
    if not (ping := shutil.which("ping")):
        return replace(way, said="ping is not installed")
    if "iputils" not in attempt(ping, "-V").output:
        return replace(way, said="the ping installed here is not that of iputils")
    with ThreadPoolExecutor(2) as pool:
        sizes = (_PLAIN, max(mtu - HEADERS, _PLAIN))
        words = ("ping", *_UNFRAGMENTED, "-I", netdev, "-s")
        plain, full = pool.map(lambda size: attempt(*words, str(size), address), sizes)

    outcomes: list[Echo] = [
        "answers" if not ping.trouble else "silent" if ping.status == 1 else "unknown"
        for ping in (plain, full)
    ]
    said = (full.errors or plain.errors).strip().splitlines()
    return replace(
        way,
        plain=outcomes[0],
        full=outcomes[1] if mtu else "unknown",
        said=said[0] if said else "",
    )
