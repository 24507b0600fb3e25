"""Change the network that runs, with netplan and `ip`, and do not lose the way in."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from patchkit.errors import HostError
from patchkit.process import run
from patchkit.records import RecordError, read_json

_NETPLAN_SECONDS = 120  # `netplan apply` waits for systemd
_BACK_SECONDS = 20.0  # until an address is there again; DHCP may have to be asked anew


def activate_network(
    given: Mapping[str, Sequence[str]], former: Mapping[str, Sequence[str]]
) -> None:
    """Bring the network to what the files say; HostError if netplan fails or the way in is lost.

    ``given`` and ``former`` are the addresses that patchkit's file has, and had.
    """
    # Before anything changes; addresses of planned interfaces are meant to change.
    kept = _find_management_addresses({*given, *former})
    run("netplan", "generate")  # finds errors without touching an interface
    run("netplan", "apply", timeout=_NETPLAN_SECONDS)
    # networkd leaves addresses that patchkit gave and takes back where they are.
    present = {(dev, address) for dev, address, _ in _list_addresses()}
    for netdev, addresses in former.items():
        for address in set(addresses) - set(given.get(netdev, ())):
            if (netdev, address) in present:
                run("ip", "address", "del", address, "dev", netdev)
    until = time.monotonic() + _BACK_SECONDS
    while lost := kept - {address for _, address, _ in _list_addresses()}:
        if time.monotonic() > until:
            raise HostError(
                f"after `netplan apply` this machine no longer had {', '.join(sorted(lost))}",
                why="that is the address of the default route or of this SSH session",
                hint="look at `netplan get` and the log: journalctl -u systemd-networkd -u "
                "NetworkManager",
            )
        time.sleep(0.5)  # seconds between two looks


def _find_management_addresses(planned: Collection[str]) -> frozenset[str]:
    """Return the addresses through which people reach this machine.

    They are those of interfaces with a default route, and that of the SSH session.
    """
    ways = {
        route.get("dev")
        # Without a family ip shows routes of IPv4 alone.
        for family in ("-4", "-6")
        for route in run_ip(family, "route", "show", "default")
    }
    session = _find_session_address(os.getpid())
    return frozenset(
        address
        for dev, address, lasting in _list_addresses()
        if dev not in planned and ((dev in ways and lasting) or address.split("/")[0] == session)
    )


def _find_session_address(process: int) -> str:
    """Return the address of this machine that the SSH session uses, "" for none.

    sudo removes SSH_CONNECTION (client's address and port, server's address and port); a parent
    process still has it.
    """
    while process > 1:
        try:
            home = Path("/proc") / str(process)
            for variable in (home / "environ").read_bytes().split(b"\0"):
                if variable.startswith(b"SSH_CONNECTION="):
                    return variable.decode(errors="replace").split()[2]
            # The second field, the name in parentheses, may hold blanks and parentheses itself.
            process = int((home / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            return ""
    return ""


def _list_addresses() -> Iterator[tuple[str, str, bool]]:
    """Yield netdev, ``address/prefix``, and whether it is global and not temporary (IPv6)."""
    for netdev in run_ip("address", "show"):
        for entry in netdev.get("addr_info", ()):
            if "local" in entry:
                lasting = entry.get("scope") == "global" and not entry.get("temporary")
                yield netdev["ifname"], f"{entry['local']}/{entry['prefixlen']}", lasting


def run_ip(*arguments: str) -> list[dict[str, Any]]:
    """Return what ``ip -json`` answers. Raises HostError if it is missing or refuses."""
    done = run("ip", "-json", *arguments)
    try:
        # Some versions of ip print nothing where the list is empty.
        return read_json(list[dict[str, Any]], done.output or "[]")
    except RecordError:
        raise HostError(f"{done.shown} printed {done.output[:80]!r}, not JSON") from None


@contextlib.contextmanager
def ignore_hangup() -> Iterator[None]:
    """Ignore SIGHUP: the link under an SSH session may be what is changed."""
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, former)
