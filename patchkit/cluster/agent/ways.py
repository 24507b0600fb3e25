"""Try the ways from this node to others over the cable: route, echo, frames of the full MTU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from patchkit.process import Completed, attempt
from patchkit.runtime.host.ping import HEADERS, PLAIN, echo, ping_obstacle

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


def ways(addresses: Sequence[str]) -> list[dict[str, Any]]:
    """Return the way to each address, tried side by side."""
    with ThreadPoolExecutor(max_workers=max(len(addresses), 1)) as pool:
        return [asdict(each) for each in pool.map(_way, addresses)]


def _way(address: str) -> Way:
    done = attempt("ip", "-json", "route", "get", address, timeout=5)
    try:
        (route,) = json.loads(done.output)
        netdev, gateway = str(route["dev"]), str(route.get("gateway", ""))
    except (ValueError, TypeError, KeyError, AttributeError):
        return Way(address=address, said=done.trouble or "ip says nothing about the route")
    mtu = _mtu(netdev)
    if obstacle := ping_obstacle():
        return Way(address=address, netdev=netdev, gateway=gateway, mtu=mtu, said=obstacle)
    with ThreadPoolExecutor(2) as pool:
        sizes = (PLAIN, max(mtu - HEADERS, PLAIN))
        plain, full = pool.map(lambda size: echo(netdev, address, size), sizes)
    return Way(
        address=address,
        netdev=netdev,
        gateway=gateway,
        mtu=mtu,
        plain=_answer(plain),
        full=_answer(full) if mtu else "unknown",
        said=next(iter((full.errors or plain.errors).strip().splitlines()), ""),
    )


def _answer(done: Completed) -> Echo:
    return "answers" if not done.trouble else "silent" if done.status == 1 else "unknown"


def _mtu(netdev: str) -> int:
    try:
        return int(Path("/sys/class/net", netdev, "mtu").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
