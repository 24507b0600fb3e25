"""Share options between the verbs of `patchkit net`."""

from __future__ import annotations

import sys
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from pathlib import Path
from typing import Any

import click

from patchkit.quoting import quoted


class AddressType(click.ParamType[IPv4Address]):
    name = "address"

    def convert(self, value: Any, param: Any, ctx: Any) -> IPv4Address:
        try:
            return IPv4Address(value)
        except ValueError:
            self.fail(f"{value!r} is not an IPv4 address", param, ctx)


class InterfaceType(click.ParamType[IPv4Interface]):
    """An address with its prefix; without one it gets /32, which says that none was given."""

    name = "address"

    def convert(self, value: Any, param: Any, ctx: Any) -> IPv4Interface:
        try:
            return IPv4Interface(value)
        except ValueError:
            self.fail(f"{value!r} is not an IPv4 address like 192.168.100.10/24", param, ctx)


class NetworkType(click.ParamType[IPv4Network]):
    name = "network"

    def convert(self, value: Any, param: Any, ctx: Any) -> IPv4Network:
        try:
            return IPv4Network(value)
        except ValueError as error:
            self.fail(f"{error}; write it as 192.168.100.0/24", param, ctx)


_folder = click.Path(path_type=Path, exists=True, file_okay=False)
ROOT = click.option("--root", type=_folder, default=Path("/"), help="Another root than /.")
MTU = click.option("--mtu", type=int, metavar="N", help="Of both ends; default: what is there.")
CAGE = click.option("--cage", type=click.Choice([0, 1]), help="0 is next to the RJ45 port.")
NETDEV = click.option(
    "--netdev", "netdevs", metavar="NAME", multiple=True, help="Instead of what is cabled; repeat."
)


def as_root() -> tuple[str, ...]:
    """Return this patchkit as words for sudo, by its full path: sudo does not look into a venv."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":  # started by python -m
        return (sys.executable, "-m", "patchkit")
    return (str(program.absolute()),)


def sudo(*arguments: str) -> str:
    """Return the command line that runs this patchkit as root."""
    return quoted("sudo", *as_root(), *arguments)
