"""Measure what a cable carries: receive on one node, send on the other. Runs on the nodes.

The data go through RDMA by perftest's ib_write_bw, or else through one TCP connection. A receiver
listens at its address on the cable alone, takes one connection, and ends after a time.
"""

import hmac
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence

from patchkit.cluster.agent.processes import find_listeners
from patchkit.errors import HostError
from patchkit.follow import Follow
from patchkit.foreign import read_count
from patchkit.process import attempt

TOOL = "ib_write_bw"
_BOUND = "--bind_source_ip"  # older releases of perftest listen at all addresses
_PATIENCE = 15.0  # seconds for the other end to come
_ANSWER_S = 5.0
_POLL_S = 0.1
_PIECE = 4 << 20  # bytes
_HALF = 16  # characters of the token: the sender shows the first half, the receiver the second
# Columns: bytes, iterations, peak and average in Gb/s, messages.
_ROW = re.compile(r"^ *\d+ +\d+ +[\d.]+ +([\d.]+) +[\d.]+ *$", re.MULTILINE)


def has_tool() -> bool:
    """Return whether ib_write_bw is installed, and can listen at one address alone."""
    done = attempt(TOOL, "--help")
    return _BOUND in done.output + done.errors


def receive(
    address: str, token: str, seconds: float, device: Sequence[str] = ()
) -> Iterator[int]:
    """Listen at an address; yield the port; take what the first sender sends, and end.

    ``device`` are the words with which ib_write_bw receives through an RDMA device. Without them, a
    sender has to know ``token``. Raises HostError unless ib_write_bw listens, and only there.
    """
    with socket.create_server((address, 0), backlog=1) as listener:
        port = listener.getsockname()[1]

        if not device:
            yield port
            listener.settimeout(_PATIENCE)
            connection, _sender = listener.accept()
            listener.close()
            _take(connection, token, seconds)
            return

    words = _tool_words(port, seconds, device)
    with Follow(*words, _BOUND, address) as tool:
        end = time.monotonic() + _ANSWER_S
        while {place.address for place in find_listeners([port])} != {address}:
            if time.monotonic() > end:
                raise HostError(f"{TOOL} does not listen at {address} alone")
            time.sleep(_POLL_S)

        yield port
        for _line in tool:
            pass


def transmit(
    address: str,
    port: int,
    netdev: str,
    token: str,
    seconds: float,
    device: Sequence[str] = (),
) -> float:
    """Send through a netdev to a receiver; return what arrived, in Gb/s.

    Raises HostError if no receiver answers, or one that does not know ``token``.
    """
    if device:
        words = _tool_words(port, seconds, device)
        done = attempt(*words, address, timeout=seconds + 2 * _PATIENCE)
        rates = _ROW.findall(done.output)
        if not rates:
            reason = done.trouble or "it printed no rate"
            raise HostError(f"{TOOL}: {reason.splitlines()[-1]}")
        return read_count(rates[-1])

    try:
        with socket.socket() as connection:
            # Whatever the routes say, and they may say the LAN.
            name = netdev.encode()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name)
            connection.settimeout(_ANSWER_S)
            connection.connect((address, port))
            return _send(connection, token, seconds)
    except (OSError, OverflowError) as error:
        raise HostError(f"{address} port {port}: {error}") from error


def _tool_words(port: int, seconds: float, device: Sequence[str]) -> list[str]:
    """Return the words of ib_write_bw, which `timeout` ends if nobody else does."""
    most = ["timeout", "-k", "1", f"{seconds + _PATIENCE:.0f}"]
    times = ["-D", f"{seconds:.0f}", "-F", "--report_gbits"]
    return [*most, TOOL, *device, "-p", str(port), *times]


def _take(connection: socket.socket, token: str, seconds: float) -> None:
    """Take the data of a sender. Raises OSError if it does not know the token."""
    with connection:
        connection.settimeout(_ANSWER_S)
        _expect(connection, token[:_HALF])
        connection.sendall(token[_HALF:].encode())

        # With MSG_TRUNC the kernel drops the data, so that no time goes into a copy.
        room = bytearray(_PIECE)

        end = time.monotonic() + seconds + _PATIENCE
        received = 1
        while received and time.monotonic() < end:
            received = connection.recv_into(room, 0, socket.MSG_TRUNC)


def _expect(connection: socket.socket, half: str) -> None:
    """Raise OSError unless the other end shows its half of the token."""
    answer = connection.recv(len(half), socket.MSG_WAITALL)
    if not hmac.compare_digest(answer, half.encode()):
        raise OSError("another program answers")


def _send(connection: socket.socket, token: str, seconds: float) -> float:
    connection.sendall(token[:_HALF].encode())
    _expect(connection, token[_HALF:])

    with os.fdopen(os.memfd_create("patchkit"), "wb+") as file:
        file.truncate(_PIECE)
        begin = time.monotonic()
        sent = 0
        while time.monotonic() < begin + seconds:
            sent += connection.sendfile(file, 0, _PIECE)

    # The receiver closes once it has taken all.
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    return sent * 8 / 1e9 / (time.monotonic() - begin)
