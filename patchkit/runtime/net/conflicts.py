"""Find what on this machine contradicts a plan: addresses, networks, other netplan files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from patchkit.errors import HostError, PatchkitError
from patchkit.quoting import quoted
from patchkit.reading import read_bytes
from patchkit.runtime.host.host import Host, Netdev
from patchkit.runtime.net.plan import NetPlan

OURS = Path("etc/netplan/40-patchkit.yaml")
# Where netplan reads: netplan(5).
_FOLDERS = ("usr/lib/netplan", "lib/netplan", "etc/netplan", "run/netplan")
# As a definition's key, and below `match:`, where a name may be a pattern.
_KEY = re.compile(r"""^\s+["']?([^\s"'#:]+)["']?:\s*(?:#.*|\{.*)?$""")
_MATCH = re.compile(r"""\b(?:name|macaddress|set-name):\s*["']?([^\s"',}#]+)""")


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A netplan file of somebody else; ``text`` is None where it may not be read."""

    path: str
    text: str | None


def check(
    host: Host, plan: NetPlan, *, applied: Mapping[str, Sequence[str]], files: Iterable[File]
) -> None:
    """Raise HostError with everything that contradicts the plan.

    ``applied`` holds the addresses that patchkit itself has given: netdev → ``address/prefix``.
    """
    kept = list(files)
    found = [
        *_foreign_addresses(host, plan, applied),
        *_collisions(host, plan),
        *_definitions(host, plan, kept),
    ]
    if found:
        raise HostError(
            "\n".join(what for what, _hint in found),
            why="two settings for one interface or one network end in one of them at random",
            hint="; ".join(dict.fromkeys(hint for _what, hint in found)),
        )


def others(root: Path) -> tuple[File, ...]:
    """Return the netplan files below a root, without patchkit's own."""
    found: dict[Path, File] = {}
    for folder in _FOLDERS:
        for path in sorted((root / folder).glob("*.yaml")):
            if path != root / OURS:
                # /lib is a link to /usr/lib on most systems: each file once.
                found.setdefault(path.resolve(), File(path=str(path), text=_text(path)))
    return tuple(found.values())


def _text(path: Path) -> str | None:
    try:
        return read_bytes(path).decode(errors="replace")
    except PatchkitError:  # netplan reads no directory and no device either
        return None


def _foreign_addresses(
    host: Host, plan: NetPlan, applied: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, str]]:
    """Yield addresses of planned netdevs that neither the plan nor patchkit gave.

    Link-local ones do not count: they go when the interface has an address of its own.
    """
    for line in plan.lines:
        netdev = host.netdev(line.netdev)
        allowed = {line.address.with_prefixlen, *applied.get(line.netdev, ())}
        for each in netdev.addresses if netdev else ():
            text = f"{each.address}/{each.prefix}"
            if each.family == "inet" and not each.link_local and text not in allowed:
                what = f"{line.netdev} has the address {text}, which is not from patchkit"
                hint = (
                    "remove it where it was configured (/etc/netplan, `nmcli device`), "
                    "or plan with the --node and --network that fit it"
                )
                yield f"{what}; planned is {line.address}", hint


def _collisions(host: Host, plan: NetPlan) -> Iterator[tuple[str, str]]:
    """Yield planned networks that another interface of this machine is already in."""
    planned = {line.netdev for line in plan.lines}
    for netdev in host.netdevs:
        if netdev.name in planned or netdev.kind == "loopback":
            continue
        for present in netdev.ipv4:
            for line in plan.lines:
                if present.network.overlaps(line.address.network):
                    what = f"{line.address.network}, planned for {line.netdev}"
                    hint = "choose another: --network 10.100.0.0/24, for example, on every node"
                    yield f"{what}, is also the network of {netdev.name} ({present})", hint


def _definitions(host: Host, plan: NetPlan, files: Sequence[File]) -> Iterator[tuple[str, str]]:
    """Yield other files that also configure an interface: netplan would merge both."""
    for line in plan.lines:
        netdev = host.netdev(line.netdev)
        for file in files:
            number = _defined(file.text or "", line.netdev, netdev)
            if number:
                aside = quoted("sudo", "mv", file.path, f"{file.path}.off")
                yield (
                    f"{file.path}:{number}: configures {line.netdev}, too",
                    f"put it aside, if nothing else needs it: {aside}",
                )


def _defined(text: str, name: str, netdev: Netdev | None) -> int:
    """Return the line where a netplan file names an interface, 0 if it does not."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            continue
        key = _KEY.match(line)
        # Line by line: no YAML parser is in the standard library.
        if key and key[1] == name:
            return number
        for pattern in _MATCH.findall(line):
            if fnmatchcase(name, pattern) or (netdev and pattern.lower() == netdev.mac):
                return number
    return 0
