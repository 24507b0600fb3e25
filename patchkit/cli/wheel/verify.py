"""Check a wheelhouse: `patchkit verify`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.padding import Padding

from patchkit.cli import show
from patchkit.cli.options import as_json
from patchkit.cli.out import print_json
from patchkit.cli.wheel.inspect_view import finding_fields
from patchkit.errors import UsageError
from patchkit.finding import worst
from patchkit.quoting import quoted
from patchkit.wheel.wheelhouse.accepted import remember
from patchkit.wheel.wheelhouse.manifest import Kind
from patchkit.wheel.wheelhouse.sign import Signed, Trust, check
from patchkit.wheel.wheelhouse.verify import Verified, verify


def trust_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add --signers, --revoked and --newer-than; hand them on as ``trust``, None without one."""

    @functools.wraps(command)
    def wrapped(
        signers: Path | None, revoked: Path | None, newer_than: str | None, **rest: Any
    ) -> None:
        if signers is None and (revoked, newer_than) != (None, None):
            raise UsageError(
                "--revoked and --newer-than are about a signature",
                hint="say with --signers FILE whose signatures count",
            )
        trust = Trust(signers, revoked, newer_than) if signers else None
        command(trust=trust, **rest)

    file = click.Path(path_type=Path)
    for option in (
        click.option(
            "--newer-than", metavar="N|DATE", help="A counter or a UTC date that is too old."
        ),
        click.option(
            "--revoked", type=file, metavar="FILE", help="Keys that count no more (KRL or keys)."
        ),
        click.option(
            "--signers",
            type=file,
            metavar="FILE",
            help="Whose signature must be there: allowed signers as in ssh-keygen(1).",
        ),
    ):
        wrapped = option(wrapped)
    return wrapped


@click.command()
@click.argument(
    "house", metavar="[WHEELHOUSE]", default=Path("wheelhouse"), type=click.Path(path_type=Path)
)
@trust_options
@as_json
def command(house: Path, *, trust: Trust | None, as_json: bool) -> None:
    """Check that the wheels of a wheelhouse are whole, load on their device, and fit together.

    It compares files with manifest, hashes and RECORD; device code with the target; vLLM, torch,
    NCCL and triton, Pythons, CPUs and CUDA with each other. That is consistency: only a signature
    says who made the wheels, and --signers checks that first.

    Exits with 8 if bytes are not those of the manifest or the signature does not hold, 7 if
    something is missing, 5 if code does not load, 3 if a wheel is not sound, 2 if wheels do not
    belong together; with the highest of these if there are several.
    """
    run(house, trust, as_json=as_json)


def run(house: Path, trust: Trust | None, *, as_json: bool) -> None:
    """Print what verification finds; SystemExit with the code of the worst finding.

    A wheelhouse whose signature does not hold is not looked into any further.
    """
    signed = check(house, trust) if trust else None
    done = verify(house)
    # Later runs must not fall behind this counter: only a sound state may set it.
    if signed and not done.findings:
        remember(signed.statement)
    if as_json:
        print_json(
            {
                "dir": str(house),
                "wheels": len(done.entries),
                "pins": dict(done.pins),
                "signature": signed.fields() if signed else None,
                "findings": [finding_fields(each) for each in done.findings],
            }
        )
    else:
        _print(show.console(), house, done, signed)
    if code := worst(done.findings):
        raise SystemExit(code)


def _print(console: Console, house: Path, done: Verified, signed: Signed | None = None) -> None:
    if done.pins:
        pins = ", ".join(f"{name} {version}" for name, version in done.pins.items())
        console.print(show.text(pins, style="dim"), soft_wrap=not console.is_terminal)
    if signed:
        console.print(show.text(("✓ ", "green"), _signature(signed)), soft_wrap=True)
    if not done.findings:
        console.print(show.text(("✓ ", "green"), f"{house}: {_counted(done)}, all as listed"))
    if not done.findings and not signed:
        command = quoted("patchkit", "verify", house, "--signers") + " FILE"
        said = f"consistent in itself; who made it says only a signature: {command}"
        console.print(show.text(("note ", "yellow"), said), soft_wrap=True)
    groups: dict[tuple[str, str, str], list[str]] = {}
    for each in done.findings:
        groups.setdefault((each.where, each.why, each.hint), []).append(each.what)
    for (filename, why, hint), whats in groups.items():
        _print_group(console, filename, [*whats, f"why: {why}" if why else ""], hint)


def _signature(signed: Signed) -> str:
    statement, seen = signed.statement, signed.seen
    past = "the first time that it is seen here: nothing to compare with"
    if seen:
        past = f"counter {seen.counter} was accepted here on {seen.accepted}"
    return (
        f"signed by {signed.signer} on {statement.date}, counter {statement.counter}; {past}\n"
        f"  wheelhouse {statement.wheelhouse}, key {signed.key}"
    )


def _print_group(console: Console, filename: str, lines: Sequence[str], hint: str) -> None:
    """Print lines below a file's name; names and commands stay whole, to be copied."""
    console.print(show.text(("✗ ", "bold red"), (filename, "bold")), soft_wrap=True)
    for line in filter(None, lines):
        if console.is_terminal:
            console.print(Padding(show.text(line), (0, 0, 0, 2), expand=False))
        else:
            console.print(show.text(f"  {line}"), soft_wrap=True)
    console.print(show.text(f"  next: {hint}", style="dim"), soft_wrap=True)


def _counted(done: Verified) -> str:
    built = sum(entry.kind is Kind.BUILT for entry in done.entries)
    others = len(done.entries) - built
    wheels = f"{built} wheel{'' if built == 1 else 's'}"
    rest = f" and {others} {'dependency' if others == 1 else 'dependencies'}"
    return wheels + (rest if others else "")
