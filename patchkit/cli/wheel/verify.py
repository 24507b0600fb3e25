"""Check a wheelhouse: `patchkit verify`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
from patchkit.wheel.wheelhouse.verify import Verified, verify_wheelhouse

LARGE = 1e9  # bytes; less takes a few seconds


@click.command()
@click.argument(
    "house", metavar="[WHEELHOUSE]", default=Path("wheelhouse"), type=click.Path(path_type=Path)
)
@rendered
def command(house: Path) -> Iterator[Block]:
    """Check that the wheels of a wheelhouse are whole, load on their device, and fit together.

    It compares files with manifest, hashes and RECORD; device code with the target; vLLM, torch,
    NCCL, triton and CUDA with each other. That is consistency: only a signature
    of SHA256SUMS (ssh-keygen -Y) says who made the wheels.

    Exits with 8 if bytes are not those of the manifest, 7 if something is missing, 5 if code does
    not load, 3 if a wheel is not sound, 2 if wheels do not belong together or none is there; with
    the highest of these if there are several.
    """
    if (size := sum(file.stat().st_size for file in house.glob("*.whl") if file.is_file())) > LARGE:
        tell(f"hashing and reading {size / 1e9:.1f} GB")
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
            "missing": done.unmet,
            "findings": done.findings,
        }
    )
    yield from _verified_lines(house, done)
    yield from finding_blocks(done.findings)
    yield ExitCode(worst(done.findings))


def _verified_lines(house: Path, done: Verified) -> Iterator[Block]:
    if done.pins:
        yield style(cell_text(done.pins), dim=True)
    yield from override_lines(done.overrides)
    yield from offer_lines(house, done.offers)
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
