"""Check a wheelhouse: `patchkit verify`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from patchkit.cli.next_step import program
from patchkit.cli.out import style, tell
from patchkit.cli.render import (
    GOOD,
    Block,
    ExitCode,
    Record,
    cell_text,
    counted_noun,
    finding_blocks,
    lead_word,
    rendered,
)
from patchkit.cli.wheel.override import offer_lines, override_fields, override_lines
from patchkit.errors import UsageError
from patchkit.finding import worst
from patchkit.quoting import quoted
from patchkit.wheel.wheelhouse.manifest import Kind
from patchkit.wheel.wheelhouse.sign import Signed, Trust, check_signature
from patchkit.wheel.wheelhouse.verify import Verified, verify_wheelhouse

LARGE = 1e9  # bytes; less takes a few seconds


def trust_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --signers and --revoked."""
    file = click.Path(path_type=Path)
    revoked = click.option(
        "--revoked", type=file, metavar="FILE", help="Keys that count no more (KRL or keys)."
    )
    signers = click.option(
        "--signers",
        type=file,
        metavar="FILE",
        help="Whose signature must be there: allowed signers as in ssh-keygen(1).",
    )
    return signers(revoked(command))


@click.command()
@click.argument(
    "house", metavar="[WHEELHOUSE]", default=Path("wheelhouse"), type=click.Path(path_type=Path)
)
@trust_options
@rendered
def command(house: Path, *, signers: Path | None, revoked: Path | None) -> Iterator[Block]:
    """Check that the wheels of a wheelhouse are whole, load on their device, and fit together.

    It compares files with manifest, hashes and RECORD; device code with the target; vLLM, torch,
    NCCL and triton, Pythons and CUDA with each other. That is consistency: only a signature
    says who made the wheels, and --signers checks that first.

    Exits with 8 if bytes are not those of the manifest or the signature does not hold, 7 if
    something is missing, 5 if code does not load, 3 if a wheel is not sound, 2 if wheels do not
    belong together or none is there; with the highest of these if there are several.
    """
    # A wheelhouse whose signature does not hold is not looked into any further.
    if revoked and not signers:
        raise UsageError(
            "--revoked is about a signature",
            hint="say with --signers FILE whose signatures count",
        )
    if (size := sum(file.stat().st_size for file in house.glob("*.whl") if file.is_file())) > LARGE:
        tell(f"hashing and reading {size / 1e9:.1f} GB")
    signed = check_signature(house, Trust(signers, revoked)) if signers else None
    done = verify_wheelhouse(house)
    if not done.entries and not done.findings:
        raise UsageError(
            f"{house}: holds no wheels",
            why="another folder is meant, or nothing was put there",
            hint="name a wheelhouse; or put a wheel there: "
            + quoted("patchkit", "repack", "vllm==X.Y.Z", "--dir", house),
        )
    yield Record(
        {
            "dir": house,
            "wheels": len(done.entries),
            "pins": done.pins,
            **override_fields(done.overrides, done.offers),
            "signature": signed,
            "missing": done.unmet,
            "findings": done.findings,
        }
    )
    yield from _verified_lines(house, done, signed)
    yield from finding_blocks(done.findings)
    yield ExitCode(worst(done.findings))


def _verified_lines(house: Path, done: Verified, signed: Signed | None) -> Iterator[Block]:
    if done.pins:
        yield style(cell_text(done.pins), dim=True)
    yield from override_lines(done.overrides)
    yield from offer_lines(house, done.offers)
    if signed:
        yield GOOD + f"signed by {signed.signer}, key {signed.key}"
    if not done.findings:
        built = sum(entry.kind is Kind.BUILT for entry in done.entries)
        others = len(done.entries) - built
        rest = f" and {counted_noun(others, 'dependency', 'dependencies')}" if others else ""
        yield GOOD + f"{house}: {counted_noun(built, 'wheel')}{rest}, all as listed"
    if done.unmet:
        yield (
            lead_word("note")
            + f"not here, and not checked: {', '.join(done.unmet)} and what those need. pip takes "
            + "them from an index; this locks them for every node: "
            + f"`{quoted(*program(), 'wheelhouse', 'fill', '--dir', house)}`"
        )
    if not done.findings and not signed:
        why = "consistent in itself; only a signature says who made it: "
        check = f"`{quoted(*program(), 'verify', house, '--signers', 'FILE')}`"
        yield lead_word("note") + why + check
