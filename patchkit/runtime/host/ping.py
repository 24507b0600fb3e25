"""Send echo requests that may not be divided, through one interface. No rights needed."""

from __future__ import annotations

import shutil
from functools import cache

from patchkit.follow import Completed
from patchkit.process import attempt

HEADERS = 28
"""Bytes of IPv4 (20) and ICMP (8), which an MTU has less for the payload."""

PLAIN = 56
"""Bytes of payload, as ping itself sends."""


@cache
def ping_obstacle() -> str:
    """Return why ping cannot be used, or "". Only that of iputils forbids fragments, by -M do."""
    if not (ping := shutil.which("ping")):
        return "ping is not installed"
    fits = "iputils" in attempt(ping, "-V").output
    return "" if fits else "the ping installed here is not that of iputils"


def echo(netdev: str, address: str, size: int) -> Completed:
    """Send packets of that many bytes of payload, unfragmented, and wait for them to come back.

    The exit status decides: 0 for an answer, 1 where nothing came back, 2 for any other error; the
    words differ between versions.
    """
    options = ("-4", "-n", "-c", "3", "-i", "0.2", "-W", "1", "-M", "do")
    return attempt("ping", *options, "-s", str(size), "-I", netdev, address)
