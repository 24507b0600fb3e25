"""Find what on this machine fights a plan: addresses, networks, files that configure the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from ipaddress import IPv4Interface, IPv4Network
from pathlib import Path

from patchkit.cluster.net.numbers import free_base
from patchkit.cluster.net.plan import Given, Line, NetPlan, NetPlanOptions, again
from patchkit.errors import HostError, PatchkitError
from patchkit.quoting import quoted
from patchkit.reading import read_bytes
from patchkit.runtime.host.host import Host, Netdev

OURS = Path("etc/netplan/40-patchkit.yaml")
# Where netplan reads: netplan(5).
_FOLDERS = ("usr/lib/netplan", "lib/netplan", "etc/netplan", "run/netplan")
# As a definition's key, and below `match:`, where a name may be a pattern.
_KEY = re.compile(r"""^\s+["']?([^\s"'#:]+)["']?:\s*(?:#.*|\{.*)?$""")
_MATCH = re.compile(r"""\b(?:name|macaddress|set-name):\s*["']?([^\s"',}#]+)""")
# What a definition may say beside ours: netplan merges both, and these agree.
_HARMLESS = re.compile(
    r"""(?:optional:|accept-ra:|dhcp[46]:\s*(?:false|no)\b|link-local:\s*\[\s*\]|\#|$)"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A netplan file of somebody else; ``text`` is None where it may not be read."""

    path: str
    text: str | None


@dataclass(frozen=True, slots=True)
class _Fight:
    what: str
    hints: tuple[str, ...]


def check(
    host: Host, plan: NetPlan, options: NetPlanOptions, *, given: Given, files: Iterable[File]
) -> None:
    """Raise HostError with everything that fights the plan, and the commands that end it."""
    kept = list(files)
    found = [
        *_foreign_addresses(host, plan, options, given, kept),
        *_collisions(host, plan, options, given),
        *_definitions(host, plan, options, kept),
    ]
    if found:
        raise HostError(
            "\n".join(each.what for each in found),
            why="two settings for one interface or one network end in one of them at random",
            hint="; or ".join(dict.fromkeys(hint for each in found for hint in each.hints)),
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
    host: Host, plan: NetPlan, options: NetPlanOptions, given: Given, files: Sequence[File]
) -> Iterator[_Fight]:
    """Yield addresses that the plan would change and that somebody else gave.

    Only ``--network`` asks for that. Link-local ones do not count: they go when the interface has
    an address of its own.
    """
    keep = f"keep it: {again(replace(options, network=None))}"
    for line in plan.changes:
        netdev = host.netdev(line.netdev)
        for each in netdev.ipv4 if netdev else ():
            ours = each in line.addresses or str(each) in given.ever.get(line.netdev, ())
            if not ours and not each.is_link_local:
                who, cure = _giver(each, line, files)
                planned = ", ".join(map(str, line.addresses))
                what = f"{line.netdev} has the address {each}, {who}; planned is {planned}"
                yield _Fight(what, (keep, f"give it up: {cure}"))


def _giver(address: IPv4Interface, line: Line, files: Sequence[File]) -> tuple[str, str]:
    """Return who gave an address, and the command that takes it away or shows more."""
    for file in files:
        for number, text in enumerate((file.text or "").splitlines(), 1):
            if re.search(rf"(?<![\d.]){re.escape(str(address))}(?!\d)", text):
                apply = quoted("sudo", "netplan", "apply")
                return f"from {file.path}:{number}", f"{_aside(file.path)} && {apply}"
    return (
        "which is not from patchkit and in no netplan file that could be read",
        without_ipv4(line.netdev),
    )


def without_ipv4(netdev: str) -> str:
    """Return the command that takes an interface's IPv4 away where NetworkManager has it."""
    profile = quoted("nmcli", "-g", "GENERAL.CONNECTION", "device", "show", netdev)
    reapply = quoted("sudo", "nmcli", "device", "reapply", netdev)
    modify = ("sudo nmcli connection modify", f'"$({profile})"', "ipv4.method disabled")
    return " ".join((*modify, "&&", reapply))


def _aside(path: str) -> str:
    return quoted("sudo", "mv", path, f"{path}.off")


def _collisions(
    host: Host, plan: NetPlan, options: NetPlanOptions, given: Given
) -> Iterator[_Fight]:
    """Yield networks that the plan adds and that another interface of this machine is in."""
    replaced = {line.netdev for line in plan.changes}
    for netdev in host.netdevs:
        if netdev.name in replaced or netdev.kind == "loopback":
            continue
        for present in netdev.ipv4:
            if str(present) in given.ever.get(netdev.name, ()):
                continue  # it goes with the file that gave it
            for line in plan.changes:
                for each in line.addresses:
                    # What the line had already is no news, and none of the plan's.
                    if each not in line.before and present.network.overlaps(each.network):
                        what = f"{each.network}, planned for {line.netdev}, is also the network of"
                        hint = _elsewhere(host, plan, options)
                        yield _Fight(f"{what} {netdev.name} ({present})", (hint,))


def _elsewhere(host: Host, plan: NetPlan, options: NetPlanOptions) -> str:
    """Return how to plan in a network that is free here, for all that is counted by node."""
    if any(line.action == "keep" and line.addresses for line in plan.lines):
        return (
            "give it one beside the address that the other end has, or will have, for example "
            f"{again(replace(options, peers=(IPv4Interface('10.100.0.10/24'),)))}"
        )
    taken = [each.network for netdev in host.netdevs for each in netdev.ipv4]
    free = free_base(taken, 2 * options.nodes) or IPv4Network("10.100.0.0/24")
    elsewhere = replace(options, network=free, peers=())
    return f"choose another, on every node: {again(elsewhere)}"


def _definitions(
    host: Host, plan: NetPlan, options: NetPlanOptions, files: Sequence[File]
) -> Iterator[_Fight]:
    """Yield other files that also configure an interface: netplan would merge both."""
    for line in plan.written:
        netdev = host.netdev(line.netdev)
        for file in files:
            number = _defined(file.text or "", line, netdev)
            if number:
                what = f"{file.path}:{number}: also configures {line.netdev}"
                hint = f"put it aside, if nothing else needs it: {_aside(file.path)} && "
                yield _Fight(what, (hint + again(options),))


def _defined(text: str, line: Line, netdev: Netdev | None) -> int:
    """Return where a netplan file says something else of an interface than the plan, or 0."""
    rows = text.splitlines()
    for number, row in enumerate(rows, 1):
        if row.lstrip().startswith("#"):
            continue
        key = _KEY.match(row)
        # Line by line: no YAML parser is in the standard library.
        if key and key[1] == line.netdev and not _agrees(rows[number - 1 :], line.mtu):
            return number
        for pattern in _MATCH.findall(row):
            if fnmatchcase(line.netdev, pattern) or (netdev and pattern.lower() == netdev.mac):
                return number
    return 0


def _agrees(rows: Sequence[str], mtu: int) -> bool:
    """Return whether the definition that begins with the first row says nothing else than ours."""
    first, *rest = rows
    if "{" in first:
        return False
    depth = len(first) - len(first.lstrip())
    for row in rest:
        if row.strip() and len(row) - len(row.lstrip()) <= depth:
            break
        said = row.strip()
        if not (_HARMLESS.match(said) or re.match(rf"mtu:\s*{mtu}\b", said)):
            return False
    return True
