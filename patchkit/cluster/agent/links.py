"""Try how this node reaches other nodes: by ssh with the node's own settings, and on the cable."""

import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Literal

from patchkit.cluster.ssh.node import require_all, run_on_all
from patchkit.cluster.ssh.ssh import (
    TOOL_WORDS,
    check_destination,
    error_fields,
    ssh_error,
    ssh_words,
)
from patchkit.follow import Completed
from patchkit.foreign import read_json
from patchkit.frozen import Texts, frozen
from patchkit.process import attempt
from patchkit.runtime.host.probe import LIVE, Reader

HEADERS = 28
"""Bytes of the headers of IPv4 (20) and ICMP (8); the largest payload of a ping is the MTU less."""

_PLAIN = 56  # bytes of payload: ping's default
_STANDARD_PORT = "22"
# A link shares no connection with other ssh programs: after a cable was out, such a connection may
# hang.
_OWN_CONNECTION = ("ConnectTimeout=5", "ControlMaster=no", "ControlPath=none")


@frozen
class PeerLink:
    """The words of ssh that lead from the head to a worker.

    ``error`` has the fields of the error with which a try ended, {} for none.
    """

    words: Texts
    error: dict[str, str]


def try_links(peers: Sequence[tuple[str, str]]) -> list[PeerLink]:
    """Try the link to each peer, ``(DESTINATION, ADDRESS ON THE CABLE)``, as a unit would.

    A unit has no SSH agent: the key has to work without one. With the address "" ssh goes its own
    way to the destination. ssh looks up the host key under the destination's name, whatever the
    address is. A link that fails is returned with its error.
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
        error = error_fields(ssh_error(done, destination)) if done.trouble else {}
        links.append(PeerLink(words=words, error=error))
    return links


def _settings_over_cable(destination: str, address: str) -> list[str]:
    """Return the settings with which ssh reaches a destination at its address on the cable.

    Returns [] if ssh uses that address anyway.
    """
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
"""A port in the range from which the system chooses ports for torch, gloo and NCCL.

No program listens there.
"""

_CONNECT_SECONDS = 4.0  # TCP tries three times in this time


def try_ports(addresses: Sequence[str], port: int) -> list[str]:
    """Return what keeps this node from a TCP port of each address, "" if nothing does.

    No program listens there: the other node refuses the connection at once. Any other answer, or
    none, is a firewall's.
    """
    return require_all(run_on_all(addresses, lambda address: _try_port(address, port)))


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
    """The way to an address: the interface that the kernel sends through, and the echoes.

    ``mtu`` is that of the interface, 0 if unknown. ``plain`` is the echo of small frames, ``full``
    that of frames as large as the MTU. ``said`` is what ping or ip wrote about an echo that failed,
    or why none was tried.
    """

    address: str
    netdev: str = ""
    gateway: str = ""
    mtu: int = 0
    plain: Echo = "unknown"
    full: Echo = "unknown"
    said: str = ""


def try_ways(addresses: Sequence[str]) -> list[Way]:
    """Return the way to each address; they are tried at the same time."""
    return require_all(run_on_all(addresses, _try_way))


def _try_way(address: str) -> Way:
    """Return the way to an address; without a route, with what `ip` says instead."""
    done = attempt("ip", "-json", "route", "get", address, timeout=5)
    try:
        (route,) = read_json(done.output)
        netdev = str(route["dev"])
        gateway = str(route.get("gateway", ""))
    except (ValueError, TypeError, KeyError, AttributeError):
        silence = done.trouble or "ip says nothing about the route"
        return Way(address=address, said=silence)

    mtu = Reader(LIVE).number(f"sys/class/net/{netdev}/mtu") or 0
    return _ping(Way(address=address, netdev=netdev, gateway=gateway, mtu=mtu))


def _ping(way: Way) -> Way:
    """Return a way with its echoes: of small frames, and of frames that fill the MTU."""
    # Only iputils' ping has `-M do`, which forbids fragments.
    version = attempt("ping", "-V")
    if "iputils" not in version.output:
        problem = version.trouble or "installed here is not that of iputils"
        return replace(way, said=f"ping {problem}")

    words = ("ping", *TOOL_WORDS["ping"], "-I", way.netdev, "-s")
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
    """Return the echo that the exit status of iputils' ping stands for."""
    if not ping.trouble:
        return "answers"
    if ping.status == 1:
        return "silent"
    return "unknown"
