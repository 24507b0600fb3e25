"""Try the ports that ranks need between nodes: one end listens, the other connects."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

_SECONDS = 3.0  # for one connection: a firewall that drops packets says nothing
_LONG = 3600.0


def hold_ports(address: str, ports: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield what listens at an address of this node, as long as the asker does.

    ``{"open": [PORT...], "taken": [PORT...]}``; port 0 stands for any that is free.
    """
    taken = []
    with contextlib.ExitStack() as stack:
        found = []
        for port in ports:
            server = stack.enter_context(socket.socket())
            # A connection of the rank before may still be in TIME_WAIT, which hinders nobody.
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind((address, port))
                server.listen()
            except OSError:
                taken.append(port)
                continue
            found.append(server.getsockname()[1])
            threading.Thread(target=_accept, args=[server], daemon=True).start()
        yield {"open": found, "taken": taken}
        time.sleep(_LONG)


def _accept(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            server.accept()[0].close()


def find_blocked(address: str, ports: Sequence[int]) -> list[int]:
    """Return the ports at another node's address that this node cannot connect to."""
    found = []
    for port in ports:
        try:
            socket.create_connection((address, port), _SECONDS).close()
        except OSError:
            found.append(port)
    return found
