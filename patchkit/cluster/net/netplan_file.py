"""Write the netplan file of a plan, and find what fights it: addresses, networks, other files."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from ipaddress import IPv4Interface, IPv4Network
from pathlib import Path

from patchkit.cluster.net.plan import Given, NetPlan, NetPlanOptions
from patchkit.errors import HostError, PatchkitError
from patchkit.quoting import quoted
from patchkit.reading import read_bytes
from patchkit.runtime.host.host import Host
from patchkit.runtime.rules.refusals import refusal
from patchkit.runtime.rules.releases import read_env_data

_NETWORK = read_env_data("network")
OURS = Path("etc/netplan/40-patchkit.yaml")
# Where netplan reads: netplan(5).
_FOLDERS = ("usr/lib/netplan", "lib/netplan", "etc/netplan", "run/netplan")
# At most 15 characters: IFNAMSIZ of Linux less its NUL.
_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,14}")
# What render_netplan writes: an interface with its rows; the comment at the top.
_OWN = re.compile(r'^ {4}"([^"\n]+)":.*\n((?: {6}.*\n)+)', re.MULTILINE)
_FOR_NODE = re.compile(r"#.* for node (\d{1,3})\.")
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
        f"# Written by `patchkit net plan -o`{f' for node {plan.node}' if plan.node else ''}.",
        "network:",
        "  version: 2",
        "  ethernets:",
    ]
    for line in plan.written:
        if not _NAME.fullmatch(line.netdev):
            raise refusal("netdev-name", name=line.netdev)
        lines += [
            # Quoted: YAML could read a name as a number, a boolean (1.1: also y, no, on) or null.
            f'    "{line.netdev}": # {line.place}',
            "      optional: true",
            "      dhcp4: false",
            "      dhcp6: false",
            "      link-local: []",
            f"      mtu: {line.mtu}",
            "      addresses:",
            *(f"        - {address.with_prefixlen}" for address in line.addresses),
        ]
    return "\n".join(lines) + "\n"


def read_given(path: Path) -> Given | None:
    """Return what patchkit's file gives, nothing for no file; None if it may not be read."""
    if not os.path.lexists(path):
        return Given()
    try:
        text = read_bytes(path).decode(errors="replace")
    except PatchkitError:
        return None
    addresses: dict[str, tuple[str, ...]] = {}
    for netdev, rows in _OWN.findall(text):
        # Somebody may have edited it.
        with contextlib.suppress(ValueError):
            own = re.findall(r"^ {8}- (\S+)$", rows, re.MULTILINE)
            addresses[netdev] = tuple(str(IPv4Interface(address)) for address in own)
    mtus = set(re.findall(r"^ {6}mtu: (\d{1,5})$", text, re.MULTILINE))
    node = _FOR_NODE.match(text)
    return Given(
        addresses=addresses,
        node=int(node[1]) if node else 0,
        mtu=int(mtus.pop()) if len(mtus) == 1 else 0,
    )


NetplanFiles = Mapping[str, str | None]
"""Path of a netplan file of somebody else → its text, None where it may not be read."""


def read_other_files(root: Path) -> NetplanFiles:
    """Return the netplan files below a root, without patchkit's own."""
    found: dict[str, str | None] = {}
    paths = [
        path for folder in _FOLDERS for path in sorted((root / folder).glob("*.yaml"))
    ]
    # /lib is a link to /usr/lib on most systems: each file once.
    for path in {
        each.resolve(): each for each in paths if each != root / OURS
    }.values():
        try:
            found[str(path)] = read_bytes(path).decode(errors="replace")
        except PatchkitError:  # netplan reads no directory and no device either
            found[str(path)] = None
    return found


_Conflict = tuple[
    str, tuple[str, ...]
]  # what fights the plan, and the commands that end it


def check_conflicts(
    host: Host,
    plan: NetPlan,
    options: NetPlanOptions,
    given: Given,
    files: NetplanFiles,
) -> None:
    """Raise HostError with everything that fights the plan, and the commands that end it."""
    found = [
        *_find_foreign_addresses(host, plan, options, given, files),
        *_find_same_networks(host, plan, options, given),
    ]
    # Other files that configure an interface as well: netplan would merge both.
    for line, (path, text) in itertools.product(plan.written, files.items()):
        netdev = host.netdev(line.netdev)
        mac = netdev.mac if netdev and netdev.mac else "no MAC"
        # Line by line: no YAML parser is in the standard library.
        for number, row in enumerate((text or "").splitlines(), 1):
            key, patterns = _KEY.match(row), _MATCH.findall(row)
            own = key is not None and key[1] == line.netdev
            matched = any(
                fnmatchcase(line.netdev, p) or p.lower() == mac for p in patterns
            )
            if (own or matched) and not row.lstrip().startswith("#"):
                what = f"{path}:{number}: also configures {line.netdev}"
                aside = quoted("sudo", "mv", path, f"{path}.off")
                cure = f"put it aside, if nothing else needs it: {aside} && "
                found.append((what, (cure + options.command_line(),)))
                break
    if found:
        raise HostError(
            "\n".join(what for what, _hints in found),
            why="two settings for one interface or one network end in one of them at random",
            hint="; or ".join(
                dict.fromkeys(hint for _what, hints in found for hint in hints)
            ),
        )


def _find_foreign_addresses(
    host: Host,
    plan: NetPlan,
    options: NetPlanOptions,
    given: Given,
    files: NetplanFiles,
) -> Iterator[_Conflict]:
    """Yield addresses that the plan would change and that somebody else gave.

    Only ``--network`` asks for that. Link-local ones do not count: they go when the interface has
    an address of its own.
    """
    keep = replace(options, network=None).command_line()
    for line in plan.changes:
        netdev = host.netdev(line.netdev)
        ours = (*map(str, line.addresses), *given.addresses.get(line.netdev, ()))
        foreign = (
            str(one)
            for one in (netdev.lasting if netdev else ())
            if str(one) not in ours
        )
        for address in foreign:
            who = "which is in no netplan file that could be read"
            cure = _NETWORK["plan"]["give_up"].format(netdev=quoted(line.netdev))
            for path, text in files.items():
                found = re.search(rf"(?<![\d.]){re.escape(address)}(?!\d)", text or "")
                if text and found:
                    who = f"from {path}:{text[: found.start()].count(chr(10)) + 1}"
                    cure = f"{quoted('sudo', 'mv', path, f'{path}.off')} && sudo netplan apply"
            planned = ", ".join(map(str, line.addresses))
            what = (
                f"{line.netdev} has the address {address}, {who}; planned is {planned}"
            )
            yield what, (f"keep it: {keep}", f"give it up: {cure}")


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
        if str(present)
        not in given.addresses.get(netdev.name, ())  # it goes with its file
    ]
    taken = [address.network for netdev in host.netdevs for address in netdev.ipv4]
    bases = [IPv4Network(base) for base in _NETWORK["plan"]["networks"]]
    # The networks that follow a base are twin B's and those of further links.
    free = next(
        (b for b in bases if not any(b.supernet(4).overlaps(n) for n in taken)),
        bases[1],
    )
    elsewhere = replace(options, network=free).command_line()
    for line, (name, present) in itertools.product(plan.changes, others):
        # What the line had already is no news, and none of the plan's.
        for address in (new for new in line.addresses if new not in line.before):
            if present.network.overlaps(address.network):
                what = f"{address.network}, planned for {line.netdev}, is also the network of"
                hint = f"choose another, on every node: {elsewhere}"
                yield f"{what} {name} ({present})", (hint,)
