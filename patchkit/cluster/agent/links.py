"""Try how this node reaches other nodes: by ssh with its own configuration, and on the cable."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Literal

from patchkit.cluster.ssh.ssh import (
    check_destination,
    error_fields,
    ssh_error,
    ssh_words,
)
from patchkit.follow import Completed
from patchkit.foreign import read_json
from patchkit.frozen import frozen
from patchkit.process import attempt

HEADERS = 28
"""Bytes of IPv4 (20) and ICMP (8), which an MTU has less for the payload."""

_PLAIN = 56  # bytes of payload, as ping itself sends
# Three packets; ping's status is 0 for answers, 1 for none, 2 for an error.
_UNFRAGMENTED = ("-4", "-n", "-c", "3", "-i", "0.2", "-W", "1", "-M", "do")
_STANDARD_PORT = "22"
# A link does not share a connection of ssh: that one may hang behind a cable that was out.
_OWN_CONNECTION = ("ConnectTimeout=5", "ControlMaster=no", "ControlPath=none")


@frozen
class PeerLink:
    """The words of ssh from the head to a worker; ``error`` has the fields of one, {} for none."""

    words: tuple[str, ...]
    error: dict[str, str]


def try_links(peers: Sequence[tuple[str, str]]) -> list[PeerLink]:
    """Return the link to each peer, ``(DESTINATION, ADDRESS ON THE CABLE)``, tried as a unit would.

    A unit has no agent of a login: the key must work without one. Without an address ssh's own way
    is taken. ssh looks for the host key where it has that of the destination, at any address.
    """
    environment = {**os.environ}
    environment.pop("SSH_AUTH_SOCK", None)
    links = []

    for destination, address in peers:
        check_destination(destination)
        settings = [*_OWN_CONNECTION]
        if address:
            settings += _settings_over_cable(destination, address)
        options = [word for setting in settings for word in ("-o", setting)]

        words = ssh_words(destination, *options)
        done = attempt(*words, "true", env=environment, timeout=30)
        error = {}
        if done.trouble:
            error = error_fields(ssh_error(done, destination))

        links.append(PeerLink(words=words, error=error))
    return links


def _settings_over_cable(destination: str, address: str) -> list[str]:
    """Return the settings of ssh that lead to a destination at its address on the cable."""
    lines = attempt("ssh", "-G", "--", destination).output.split("\n")
    settings = dict(line.partition(" ")[::2] for line in lines)
    host = settings.get("hostname", destination)
    if address == host:
        return []

    port = settings.get("port", _STANDARD_PORT)
    host_key = host if port == _STANDARD_PORT else f"[{host}]:{port}"
    return [
        f"HostName={address}",
        f"HostKeyAlias={settings.get('hostkeyalias') or host_key}",
        "CheckHostIP=no",
        # The cable needs no jump host.
        "ProxyJump=none",
        "ProxyCommand=none",
    ]


CHOSEN_PORT = 47001
"""A port like those that the system chooses for torch, gloo and NCCL; nobody listens there."""

_CONNECT_SECONDS = 4.0  # TCP tries three times in them


def try_ports(addresses: Sequence[str], port: int) -> list[str]:
    """Return the trouble between this node and a TCP port of each address, "" for none.

    A port where nobody listens is refused at once: only a firewall is silent, or answers otherwise.
    """
    with ThreadPoolExecutor(max_workers=max(len(addresses), 1)) as pool:
        return list(pool.map(_try_port, addresses, repeat(port)))


def _try_port(address: str, port: int) -> str:
    try:
        socket.create_connection((address, port), _CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


Echo = Literal["answers", "silent", "unknown"]


@frozen
class Way:
    """The way to one address: the interface that the kernel sends through, and the echoes.

    ``mtu`` is that of the interface, 0 if unknown; ``full`` is an echo of frames of that size,
    ``said`` what ping or ip wrote about it, or why it was not tried.
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
        netdev = str(route["dev"])
        gateway = str(route.get("gateway", ""))
    except (ValueError, TypeError, KeyError, AttributeError):
        silence = done.trouble or "ip says nothing about the route"
        return Way(
            address=address,
            said=silence,
        )

    mtu = 0
    with suppress(OSError, ValueError):
        file = Path("/sys/class/net", netdev, "mtu")
        mtu = int(file.read_text(encoding="ascii"))
    return _ping(
        Way(
            address=address,
            netdev=netdev,
            gateway=gateway,
            mtu=mtu,
        )
    )


def _ping(way: Way) -> Way:
    """Return a way with its echoes: of a small frame, and of one that fills the MTU."""
    # Only iputils' ping forbids fragments by -M do.
    program = shutil.which("ping")
    if not program:
        return replace(way, said="ping is not installed")
    if "iputils" not in attempt(program, "-V").output:
        return replace(way, said="the ping installed here is not that of iputils")

    words = ("ping", *_UNFRAGMENTED, "-I", way.netdev, "-s")
    sizes = (_PLAIN, max(way.mtu - HEADERS, _PLAIN))
    with ThreadPoolExecutor(2) as pool:
        plain, full = pool.map(
            lambda size: attempt(*words, str(size), way.address), sizes
        )

    lines = (full.errors or plain.errors).strip().splitlines()
    return replace(
        way,
        plain=_echo(plain),
        full=_echo(full) if way.mtu else "unknown",
        said=lines[0] if lines else "",
    )


def _echo(ping: Completed) -> Echo:
    if not ping.trouble:
        return "answers"
    if ping.status == 1:
        return "silent"
    return "unknown"
