"""Write the netplan file of a plan, and find its conflicts: addresses, networks, other files."""

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from ipaddress import IPv4Interface, IPv4Network
from pathlib import Path

from patchkit.cluster.net.addressing import NetPlan, NetPlanOptions, WrittenPlan
from patchkit.errors import HostError, PatchkitError
from patchkit.frozen import Texts, positional
from patchkit.quoting import quoted
from patchkit.reading import read_bytes
from patchkit.runtime.host.host import Host
from patchkit.runtime.rules.releases import read_env_data, refusal

_NETWORK = read_env_data("network")
OURS = Path("etc/netplan/40-patchkit.yaml")
# Where netplan reads: netplan(5). /lib is a link to /usr/lib where both have files.
_FOLDERS = ("lib/netplan", "etc/netplan", "run/netplan")
# At most 15 characters: IFNAMSIZ of Linux less its NUL.
_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,14}")
# Parts of the text that render_netplan writes: an interface with its rows, and the first line.
_INTERFACE = re.compile(r'^ {4}"([^"\n]+)":.*\n((?: {6}.*\n)+)', re.MULTILINE)
_FOR_NODE = re.compile(r"#.* for node (\d{1,3})\.")
# Where other files name an interface: as the key of a definition, or below `match:` (a pattern).
_KEY = re.compile(r"""^\s+["']?([^\s"'#:]+)["']?:\s*(?:#.*|\{.*)?$""")
_MATCH = re.compile(r"""\b(?:name|macaddress|set-name):\s*["']?([^\s"',}#]+)""")


def render_netplan(plan: NetPlan) -> str:
    """Return the text of patchkit's netplan file, with the interfaces of ``plan.written``.

    Each of them has an address: for an interface without one, netplan 0.106 writes
    ``ipv4.method=link-local``, and NetworkManager then draws an address at random. The file names
    no renderer, so that of the machine applies: NetworkManager on a desktop, networkd on a server.
    A named renderer would take the interfaces from the other one, and would start networkd on a
    machine without it, where its wait-online can delay every boot. ``optional`` lets the machine
    boot without a link. Raises HostError for a name of an interface that the file cannot hold.
    """
    node = f" for node {plan.node}" if plan.node else ""
    rows = [
        f"# Written by `patchkit net plan -o`{node}.",
        "network:",
        "  version: 2",
        "  ethernets:",
    ]

    for line in plan.written:
        if not _NAME.fullmatch(line.netdev):
            raise refusal("netdev-name", name=line.netdev)

        rows += [
            # Quoted: YAML could read a name as a number, a boolean (1.1: also y, no, on) or null.
            f'    "{line.netdev}": # {line.place}',
            "      optional: true",
            "      dhcp4: false",
            "      dhcp6: false",
            "      link-local: []",
            f"      mtu: {line.mtu}",
            "      addresses:",
        ]

        rows += [f"        - {address.with_prefixlen}" for address in line.addresses]
    return "\n".join(rows) + "\n"


def read_written_plan(path: Path) -> WrittenPlan | None:
    """Return the content of patchkit's file, an empty one for no file; None if it is unreadable."""
    if not os.path.lexists(path):
        return WrittenPlan()

    text = _read_if_allowed(path)
    if text is None:
        return None

    addresses: dict[str, Texts] = {}
    for netdev, rows in _INTERFACE.findall(text):
        # The file may have been edited: an interface with an invalid address is left out.
        with contextlib.suppress(ValueError):
            texts = re.findall(r"^ {8}- (\S+)$", rows, re.MULTILINE)
            addresses[netdev] = tuple(str(IPv4Interface(address)) for address in texts)

    mtus = set(re.findall(r"^ {6}mtu: (\d{1,5})$", text, re.MULTILINE))
    mtu = mtus.pop() if len(mtus) == 1 else "0"
    node = _FOR_NODE.match(text)
    return WrittenPlan(
        addresses=addresses,
        node=int(node[1]) if node else 0,
        mtu=int(mtu),
    )


def _read_if_allowed(path: Path) -> str | None:
    try:
        return read_bytes(path).decode(errors="replace")
    except PatchkitError:  # netplan reads no directory and no device either
        return None


NetplanFiles = Mapping[str, str | None]
"""Path of a netplan file that patchkit did not write → its text, None if it is unreadable."""


def read_other_files(root: Path) -> NetplanFiles:
    """Return the netplan files below a root, except patchkit's own."""
    files = {}
    for folder in _FOLDERS:
        for path in sorted((root / folder).glob("*.yaml")):
            if path != root / OURS:
                files[str(path)] = _read_if_allowed(path)
    return files


_Conflicts = Iterator[tuple[str, Texts]]
"""Each conflict with the plan: a text about it, and the commands that solve it."""


@positional
class PlanInputs:
    """A plan, its inputs, and the netplan files that patchkit did not write."""

    host: Host
    plan: NetPlan
    options: NetPlanOptions
    written: WrittenPlan
    files: NetplanFiles


def check_conflicts(inputs: PlanInputs) -> None:
    """Raise HostError with all conflicts of a plan, and the commands that solve them."""
    conflicts = [
        *_find_foreign_addresses(inputs),
        *_find_same_networks(inputs),
        *_find_configured(inputs),
    ]
    if not conflicts:
        return

    problems, hints = zip(*conflicts, strict=True)
    raise HostError(
        "\n".join(problems),
        why="two settings for one interface or one network end in one of them at random",
        hint="; or ".join(dict.fromkeys(itertools.chain(*hints))),
    )


def _find_configured(inputs: PlanInputs) -> _Conflicts:
    """Yield a conflict for each other file that configures an interface of the plan.

    netplan would merge both files.
    """
    again = inputs.options.command_line()
    for line in inputs.plan.written:
        for path, text in inputs.files.items():
            number = _find_row(text or "", line.netdev, inputs.host)
            if not number:
                continue

            aside = quoted("sudo", "mv", path, f"{path}.off")
            hint = f"put it aside, if nothing else needs it: {aside} && {again}"
            what = f"{path}:{number}: also configures {line.netdev}"
            yield what, (hint,)


def _find_row(text: str, name: str, host: Host) -> int:
    """Return the number of the first row of a netplan file that is about a netdev, 0 for none.

    The file is searched line by line: the standard library has no YAML parser.
    """
    netdev = host.netdev(name)
    mac = netdev.mac if netdev else ""

    for number, row in enumerate(text.splitlines(), 1):
        if row.lstrip().startswith("#"):
            continue

        key = _KEY.match(row)
        if key and key[1] == name:
            return number

        for pattern in _MATCH.findall(row):
            if fnmatchcase(name, pattern) or pattern.lower() == mac:
                return number
    return 0


def _find_foreign_addresses(inputs: PlanInputs) -> _Conflicts:
    """Yield a conflict for each address that the plan would remove and that patchkit did not give.

    Only a plan with ``--network`` removes addresses. Link-local addresses are no conflict: they go
    away when the interface gets a lasting one. ``_find_configured`` yields the files that give an
    address.
    """
    keep = replace(inputs.options, network=None).command_line()
    for line in inputs.plan.changes:
        give_up = _NETWORK["plan"]["give_up"].format(netdev=quoted(line.netdev))
        hints = (f"keep it: {keep}", f"give it up: {give_up}")
        planned = ", ".join(map(str, line.addresses))
        written = inputs.written.addresses.get(line.netdev, ())

        for address in line.before:
            is_ours = address in line.addresses or str(address) in written
            if not (is_ours or address.is_link_local):
                what = f"{line.netdev} has the address {address}"
                yield f"{what}; planned is {planned}", hints


def _find_same_networks(inputs: PlanInputs) -> _Conflicts:
    """Yield a conflict for each new network of the plan that another interface is in, too."""
    present = list(_find_unchanged(inputs))
    free = _choose_network(inputs.host)
    elsewhere = replace(inputs.options, network=free).command_line()
    hint = f"choose another, on every node: {elsewhere}"

    for line in inputs.plan.changes:
        # An address that the interface already has is not the plan's doing.
        new = [address for address in line.addresses if address not in line.before]
        for (name, other), address in itertools.product(present, new):
            if other.network.overlaps(address.network):
                planned = f"{address.network}, planned for {line.netdev}"
                what = f"{planned}, is also the network of {name} ({other})"
                yield what, (hint,)


def _find_unchanged(inputs: PlanInputs) -> Iterator[tuple[str, IPv4Interface]]:
    """Yield each interface that the plan does not change, with each address of it.

    Addresses that patchkit's file gave are left out, since the new file replaces it.
    """
    changed = {line.netdev for line in inputs.plan.changes}
    for netdev in inputs.host.netdevs:
        if netdev.name in changed or netdev.kind == "loopback":
            continue

        ours = inputs.written.addresses.get(netdev.name, ())
        for address in netdev.ipv4:
            if str(address) not in ours:
                yield netdev.name, address


def _choose_network(host: Host) -> IPv4Network:
    """Return a base for a plan such that no interface is in it, or in the networks after it.

    The networks after a base are for twin B and for further links. Return the second base of
    network.toml if none is free.
    """
    networks = [network for netdev in host.netdevs for network in netdev.networks]
    bases = [IPv4Network(base) for base in _NETWORK["plan"]["networks"]]
    for base in bases:
        following = base.supernet(4)
        if not any(map(following.overlaps, networks)):
            return base
    return bases[1]
