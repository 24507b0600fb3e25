"""Run scenarios: `python -m e2e.lifecycle WORK [--write] [SCENARIO ...]`; status 1 if one failed.

``--write`` puts the table of all of them into docs/lifecycle.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from e2e.emulation.lab import UnexpectedError
from e2e.emulation.nodes import NodeError
from e2e.lifecycle import image, rootfs
from e2e.lifecycle.cluster import SCENARIOS, USUAL, LifecycleLab
from patchkit.errors import PatchkitError
from tools.markdown import replaced, table

DOCS = Path(__file__).parents[3] / "docs"
Row = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PageTable:
    """A table of a page between marks; ``maker`` is the command that writes it."""

    page: str
    name: str
    maker: str
    header: Row


FAILURES = PageTable(
    page="lifecycle.md",
    name="table",
    maker="nox -s lifecycle -- --write",
    header=("scenario", "what happens", "s", "outcome"),
)


def run_all(
    words: Sequence[str],
    page: PageTable,
    known: Mapping[str, Callable[[LifecycleLab], Row]],
    packages: Sequence[str] = (),
    usual: Sequence[str] = (),
) -> int:
    """Run some, two side by side, and print their rows; if none is named, the ``usual`` ones."""
    usual = usual or [*known]
    parser = argparse.ArgumentParser(prog=page.maker.removesuffix(" --write"))
    parser.add_argument("work", type=Path)
    parser.add_argument(
        "--write", action="store_true", help="if all usual ones are run"
    )
    parser.add_argument("name", nargs="*", metavar="SCENARIO")
    given = parser.parse_intermixed_args(words)
    if unknown := sorted(set(given.name) - set(known)):
        parser.error(f"not known: {', '.join(unknown)}; there are {', '.join(known)}")
    work = given.work.resolve()
    lab = LifecycleLab(work, rootfs.ready(work, packages), image.ready(work))
    makers = {name: lambda name=name: known[name](lab) for name in given.name or usual}
    rows = make_rows(page.header, makers, work / "logs", side_by_side=2)
    if given.write and set(rows) == set(usual):
        place = DOCS / page.page
        made = table(page.header, [rows[name] for name in usual]).strip()
        place.write_text(replaced(place.read_text(), page.name, page.maker, made))
    return 0 if set(rows) == set(makers) else 1


def make_rows(
    header: Row,
    makers: Mapping[str, Callable[[], Row]],
    logs: Path,
    *,
    side_by_side: int,
) -> dict[str, Row]:
    """Make rows of a table and print them; every one has its turn, even if one failed."""
    rows: dict[str, Row] = {}

    def make_row(name: str) -> None:
        try:
            rows[name] = makers[name]()
            print(table(rows[name], []).splitlines()[0], flush=True)
        except (UnexpectedError, NodeError, PatchkitError, AssertionError) as error:
            print(f"{name}: FAILED: {error}", flush=True)

    print(table(header, []), end="")
    with ThreadPoolExecutor(side_by_side) as pool:
        list(pool.map(make_row, makers))
    failed = [name for name in makers if name not in rows]
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"\n{os.cpu_count()} cores, load {load}; logs: {logs}")
    print(f"failed: {', '.join(failed)}" if failed else "each as it should be")
    return rows


if __name__ == "__main__":
    for module in (
        "scenarios",
        "launching",
        "installing",
        "bringing",
        "freezing",
        "renaming",
    ):
        import_module(f"e2e.lifecycle.{module}")  # they register
    sys.exit(run_all(sys.argv[1:], FAILURES, SCENARIOS, usual=USUAL))
