"""Ask the kernel for addresses: rtnetlink's RTM_GETADDR.

Layouts: linux/netlink.h, linux/rtnetlink.h, linux/if_addr.h; integers in the machine's own order.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator

# RTM_GETADDR, RTM_NEWADDR, NLMSG_ERROR, NLMSG_DONE; NLM_F_REQUEST, NLM_F_DUMP
_GET_ADDRESSES, _NEW_ADDRESS, _ERROR, _DONE = 22, 20, 2, 3
_REQUEST, _DUMP = 1, 0x300
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_MESSAGE = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefix, flags, scope, index
_ATTRIBUTE = struct.Struct("=HH")  # rtattr: length, type
_ADDRESS, _LOCAL = 1, 2  # IFA_ADDRESS, IFA_LOCAL
_FAMILIES = {int(socket.AF_INET): "inet", int(socket.AF_INET6): "inet6"}


def address_lines() -> str:
    """Return what `ip -json address` would print, as far as a probe reads it. Raises OSError."""
    # All names first: interfaces without an address belong to the answer.
    found: dict[str, list[dict[str, object]]] = {name: [] for _, name in socket.if_nameindex()}
    for index, address in _dump_addresses():
        found.setdefault(socket.if_indextoname(index), []).append(address)
    return json.dumps([{"ifname": name, "addr_info": own} for name, own in found.items()])


def _dump_addresses() -> Iterator[tuple[int, dict[str, object]]]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(2.0)  # seconds
        body = _MESSAGE.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        length = _HEADER.size + len(body)
        kernel.send(_HEADER.pack(length, _GET_ADDRESSES, _REQUEST | _DUMP, 1, 0) + body)
        while True:
            # A datagram: what did not fit would be lost.
            for kind, message in _split_message(kernel.recv(1 << 16), _HEADER):
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    code = -struct.unpack_from("=i", message)[0]
                    raise OSError(code, os.strerror(code))
                if kind == _NEW_ADDRESS:
                    yield _read_address(message)


def _split_message(data: bytes, header: struct.Struct) -> Iterator[tuple[int, bytes]]:
    """Yield type and content of messages or attributes, each aligned to four bytes."""
    while len(data) >= header.size:
        length, kind, *_ = header.unpack_from(data)
        yield kind, data[header.size : length]
        # At least 4, since a length of 0 would never end.
        data = data[max((length + 3) & ~3, 4) :]


def _read_address(message: bytes) -> tuple[int, dict[str, object]]:
    family, prefix, _, _, index = _MESSAGE.unpack_from(message)
    told = dict(_split_message(message[_MESSAGE.size :], _ATTRIBUTE))
    # On a point-to-point link ADDRESS is the other end's.
    own = socket.inet_ntop(family, told.get(_LOCAL) or told[_ADDRESS])
    return index, {"family": _FAMILIES[family], "local": own, "prefixlen": prefix}
