"""Write the netplan file of a plan, and find what fights it: addresses, networks, other files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from patchkit.cluster.net.plan import Given, Line, NetPlan, NetPlanOptions, plan_command_line
from patchkit.cluster.net.planner import find_free_base
from patchkit.errors import HostError, PatchkitError
from patchkit.quoting import quoted
from patchkit.reading import read_bytes
from patchkit.runtime.host.host import Host, Netdev

OURS = Path("etc/netplan/40-patchkit.yaml")
# Where netplan reads: netplan(5).
_FOLDERS = ("usr/lib/netplan", "lib/netplan", "etc/netplan", "run/netplan")
# At most 15 characters: IFNAMSIZ of Linux less its NUL.
_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,14}")
# What YAML could read as a number, a boolean (1.1: also y, no, on) or null is quoted.
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_WORDS = re.compile(r"y|n|yes|no|on|off|true|false|null", re.IGNORECASE)
# As a definition's key, and below `match:`, where a name may be a pattern.
_KEY = re.compile(r"""^\s+["']?([^\s"'#:]+)["']?:\s*(?:#.*|\{.*)?$""")
_MATCH = re.compile(r"""\b(?:name|macaddress|set-name):\s*["']?([^\s"',}#]+)""")


def render_netplan(plan: NetPlan) -> str:
    """Return the netplan file: the interfaces that patchkit sets, and none that others do.

    Each has an address: of an interface without any, netplan makes ``ipv4.method=link-local`` for
    NetworkManager (0.106), which then draws one at random. The file names no renderer, so the
    machine's applies: NetworkManager on a desktop, networkd on a server. Naming one would take the
    interfaces from the other, and start networkd on a machine without it, where its wait-online can
    delay every boot. Links may be absent at boot (``optional``).
    """
    lines = [
        "# Written by `patchkit net apply`; `patchkit net undo` puts back what was here.",
        "network:",
        "  version: 2",
        "  ethernets:",
    ]
    for line in plan.written:
        if not _NAME.fullmatch(line.netdev):
            raise HostError(
                f"an interface is called {line.netdev!r}",
                why="netplan files take letters, digits, '_', '.' and '-' from patchkit, up to 15",
                hint="rename it, or configure it by hand",
            )
        plain = _PLAIN.fullmatch(line.netdev) and not _WORDS.fullmatch(line.netdev)
        key = line.netdev if plain else f'"{line.netdev}"'
        lines += [
            f"    {key}: # {line.place}",
            "      optional: true",
            "      dhcp4: false",
            "      dhcp6: false",
            "      link-local: []",
            f"      mtu: {line.mtu}",
            "      addresses:",
            *(f"        - {address.with_prefixlen}" for address in line.addresses),
        ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetplanFile:
    """A netplan file of somebody else; ``text`` is None where it may not be read."""

    path: str
    text: str | None


def read_other_files(root: Path) -> tuple[NetplanFile, ...]:
    """Return the netplan files below a root, without patchkit's own."""
    found: dict[Path, NetplanFile] = {}
    for folder in _FOLDERS:
        for path in sorted((root / folder).glob("*.yaml")):
            if path == root / OURS:
                continue
            try:
                text: str | None = read_bytes(path).decode(errors="replace")
            except PatchkitError:  # netplan reads no directory and no device either
                text = None
            # /lib is a link to /usr/lib on most systems: each file once.
            found.setdefault(path.resolve(), NetplanFile(path=str(path), text=text))
    return tuple(found.values())


_Conflict = tuple[str, tuple[str, ...]]  # what fights the plan, and the commands that end it


def check_conflicts(
    host: Host, plan: NetPlan, options: NetPlanOptions, given: Given, files: Sequence[NetplanFile]
) -> None:
    """Raise HostError with everything that fights the plan, and the commands that end it."""
    found = [
        *_find_foreign_addresses(host, plan, options, given, files),
        *_find_same_networks(host, plan, options, given),
        *_find_definitions(host, plan, options, files),
    ]
    if found:
        raise HostError(
            "\n".join(what for what, _hints in found),
            why="two settings for one interface or one network end in one of them at random",
            hint="; or ".join(dict.fromkeys(hint for _what, hints in found for hint in hints)),
        )


def _find_foreign_addresses(
    host: Host,
    plan: NetPlan,
    options: NetPlanOptions,
    given: Given,
    files: Iterable[NetplanFile],
) -> Iterator[_Conflict]:
    """Yield addresses that the plan would change and that somebody else gave.

    Only ``--network`` asks for that. Link-local ones do not count: they go when the interface has
    an address of its own.
    """
    keep = f"keep it: {plan_command_line(replace(options, network=None))}"
    for line in plan.changes:
        netdev = host.netdev(line.netdev)
        ours = (*map(str, line.addresses), *given.addresses.get(line.netdev, ()))
        for address in netdev.lasting if netdev else ():
            if str(address) in ours:
                continue
            who = "which is not from patchkit and in no netplan file that could be read"
            cure = unset_ipv4_command(line.netdev)
            for file in files:
                pattern = rf"(?<![\d.]){re.escape(str(address))}(?!\d)"
                if found := re.search(pattern, file.text or ""):
                    number = (file.text or "")[: found.start()].count("\n") + 1
                    who = f"from {file.path}:{number}"
                    cure = f"{_aside_command(file.path)} && {quoted('sudo', 'netplan', 'apply')}"
            planned = ", ".join(map(str, line.addresses))
            what = f"{line.netdev} has the address {address}, {who}; planned is {planned}"
            yield what, (keep, f"give it up: {cure}")


def unset_ipv4_command(netdev: str) -> str:
    """Return the command that takes an interface's IPv4 away where NetworkManager has it."""
    profile = quoted("nmcli", "-g", "GENERAL.CONNECTION", "device", "show", netdev)
    reapply = quoted("sudo", "nmcli", "device", "reapply", netdev)
    modify = ("sudo nmcli connection modify", f'"$({profile})"', "ipv4.method disabled")
    return " ".join((*modify, "&&", reapply))


def _aside_command(path: str) -> str:
    return quoted("sudo", "mv", path, f"{path}.off")


def _find_same_networks(
    host: Host, plan: NetPlan, options: NetPlanOptions, given: Given
) -> Iterator[_Conflict]:
    """Yield networks that the plan adds and that another interface of this machine is in."""
    changed = {line.netdev for line in plan.changes}
    others = [
        (netdev.name, present)
        for netdev in host.netdevs
        if netdev.name not in changed and netdev.kind != "loopback"
        for present in netdev.ipv4
        if str(present) not in given.addresses.get(netdev.name, ())  # it goes with its file
    ]
    taken = [address.network for netdev in host.netdevs for address in netdev.ipv4]
    free = find_free_base(taken, 2 * options.nodes)
    elsewhere = plan_command_line(replace(options, network=free))
    for line in plan.changes:
        # What the line had already is no news, and none of the plan's.
        for address in (new for new in line.addresses if new not in line.before):
            for name, present in others:
                if present.network.overlaps(address.network):
                    what = f"{address.network}, planned for {line.netdev}, is also the network of"
                    hint = f"choose another, on every node: {elsewhere}"
                    yield f"{what} {name} ({present})", (hint,)


def _find_definitions(
    host: Host, plan: NetPlan, options: NetPlanOptions, files: Iterable[NetplanFile]
) -> Iterator[_Conflict]:
    """Yield other files that also configure an interface: netplan would merge both."""
    for line in plan.written:
        for file in files:
            if number := _find_definition(file.text or "", line, host.netdev(line.netdev)):
                what = f"{file.path}:{number}: also configures {line.netdev}"
                hint = f"put it aside, if nothing else needs it: {_aside_command(file.path)} && "
                yield what, (hint + plan_command_line(options),)


def _find_definition(text: str, line: Line, netdev: Netdev | None) -> int:
    """Return the line of a netplan file that configures an interface, or 0."""
    # Line by line: no YAML parser is in the standard library.
    for number, row in enumerate(text.splitlines(), 1):
        if row.lstrip().startswith("#"):
            continue
        key = _KEY.match(row)
        if key and key[1] == line.netdev:
            return number
        for pattern in _MATCH.findall(row):
            if fnmatchcase(line.netdev, pattern) or (netdev and pattern.lower() == netdev.mac):
                return number
    return 0
