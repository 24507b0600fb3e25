"""Write the tables that releases' sources give, the catalogue, and what tests compare with.

    python -m tools.regenerate               every release
    python -m tools.regenerate --release X   that one; the rest of each table stays
    python -m tools.regenerate --fix ID      as few as tell where the level of the fix changes
    python -m tools.regenerate --pages       what is made from data (`nox -s data`), and no table
    python -m tools.regenerate --none        no release is read; those taken out leave the tables
    python -m tools.regenerate --check       ends with 1, and says what is stale, if anything was

In recipes/env: vllm_variables.tsv, vllm_values.tsv, vllm_flags.tsv, vllm_recipes.tsv and
flag_values.toml, what each release's own files say. In recipes/vllm: stock_archs.csv, what
untouched releases build for 12.0; support.json, fix → arch mode → release → how much it needs the
fix. In tests/data: archs.csv, a row per kernel group, with what the untouched release builds for
12.0 and the patched one for the arch of the mode. In docs: the table of doctor.md, the picture of
architecture.md. And what tools/golden_env.py, golden_units.py and serve_lines.py
write. Read the difference before you commit it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path

from packaging.version import Version

from patchkit.errors import PatchkitError
from patchkit.patching.fix import Fix
from patchkit.patching.plan import Plan
from patchkit.patching.recipe import load_recipe
from patchkit.proof.prove import prove
from tools import architecture, golden_env, golden_units, serve_lines, symptom_pages
from tools.seen import MODES, Seen, look_at, pristine, unproved
from tools.tables import SUPPORT, Support, updated

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def plan(root: Path, arch: str) -> Plan:
    """Return the proved plan of an untouched tree."""
    found = unproved(root, arch)
    prove(found)
    return found


def main() -> int:
    """Write what has changed, each part at its end: one that ends early leaves it as it was."""
    parser = argparse.ArgumentParser(prog="regenerate")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--release", action="append", default=[], metavar="X")
    parser.add_argument("--fix", default="", metavar="ID")
    parser.add_argument("--pages", action="store_true")
    parser.add_argument("--none", action="store_true")
    asked = parser.parse_args()
    recipe = load_recipe("vllm")
    releases = list(map(str, recipe.supported))
    if wrong := [each for each in asked.release if each not in releases]:
        parser.error(f"not in recipes/vllm/recipe.toml: {', '.join(wrong)}")
    if asked.fix and recipe.fix(asked.fix) is None:
        parser.error(f"no fix is called {asked.fix!r}")
    wanted = [] if asked.none or asked.fix else asked.release or releases
    try:
        shown = {**pages(), **goldens()} if asked.pages else {}
        stale = write(shown or tables(wanted, recipe.fix(asked.fix), releases))
    except PatchkitError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for path in stale:
        print(f"was stale: {path.resolve().relative_to(ROOT)}", file=sys.stderr)
    code = 1 if stale and asked.check else 0
    if asked.pages:
        return code
    # Readers keep what they have read, so what shows the new tables is made by another process.
    again = (
        sys.executable,
        "-m",
        "tools.regenerate",
        "--pages",
        *["--check"] * asked.check,
    )
    return subprocess.run(again, cwd=ROOT).returncode or code


def tables(
    asked: Sequence[str], fix: Fix | None, releases: Sequence[str]
) -> dict[Path, str]:
    """Return path → text of the tables that releases' sources give."""
    support: Support = json.loads(SUPPORT.read_text(encoding="utf-8"))
    seen = look_for(fix, support, releases, look) if fix else look(asked)
    if fix:
        support[fix.id] = levels(fix.id, seen, releases)
    return updated(
        seen.values(),
        releases,
        [each.id for each in load_recipe("vllm").fixes],
        support,
    )


def look(releases: Iterable[str]) -> dict[str, Seen]:
    """Read releases, side by side. Nothing is proved, since proofs compare with the tables."""
    # Not threads: CPython's ast is not safe in two of them at once.
    with ProcessPoolExecutor() as pool:
        return {seen.version: seen for seen in pool.map(_seen, releases)}


def _seen(version: str) -> Seen:
    print(version, file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        return look_at(version, pristine(version, Path(folder)))


def look_for(
    fix: Fix,
    support: Support,
    releases: Sequence[str],
    look: Callable[[list[str]], dict[str, Seen]],
) -> dict[str, Seen]:
    """Read the releases between which the level of a fix changes, and those where it could.

    These are the ends of the fix's own ranges and of its recorded levels; where two that were read
    differ, the one in the middle of them is read, until they are neighbours.
    """
    seen = look(sorted(_edges(fix, support.get(fix.id, {}), releases), key=Version))
    while between := _halves(fix.id, seen, releases):
        seen |= look(between)
    return dict(sorted(seen.items(), key=lambda each: Version(each[0])))


def _edges(
    fix: Fix, row: Mapping[str, Mapping[str, str]], releases: Sequence[str]
) -> set[str]:
    def facts(version: str) -> list[object]:
        needs = [fix.need(Version(version), mode) for mode in MODES]
        return [*needs, *(row.get(mode, {}).get(version) for mode in MODES)]

    changes = {
        end
        for pair in pairwise(releases)
        if facts(pair[0]) != facts(pair[1])
        for end in pair
    }
    return changes | {releases[0], releases[-1]}


def _halves(fix: str, seen: Mapping[str, Seen], releases: Sequence[str]) -> list[str]:
    # Two changes between releases that agree would go unseen: _edges has the recorded ones.
    places = sorted(map(releases.index, seen))
    return [
        releases[(low + high) // 2]
        for low, high in pairwise(places)
        if high - low > 1
        and seen[releases[low]].support[fix] != seen[releases[high]].support[fix]
    ]


def levels(
    fix: str, seen: Mapping[str, Seen], releases: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Return arch mode → release → level, for one that was not read that of the one before."""
    latest = seen[releases[0]]
    found: dict[str, dict[str, str]] = {mode: {} for mode in MODES}
    for version in releases:
        latest = seen.get(version, latest)
        for mode in MODES:
            found[mode][version] = latest.support[fix][mode]
    return found


def goldens() -> dict[Path, str]:
    """Return path → text of what tests compare with."""
    return {
        **golden_env.golden(),
        **golden_units.golden(),
        serve_lines.PLACE: serve_lines.text(),
    }


def pages() -> dict[Path, str]:
    """Return path → text of the pages that hold a table made from data."""
    doctor = DOCS / "doctor.md"
    return {
        doctor: symptom_pages.accuracy(doctor.read_text(encoding="utf-8")),
        architecture.PAGE: architecture.page(
            architecture.PAGE.read_text(encoding="utf-8")
        ),
    }


def write(texts: Mapping[Path, str]) -> list[Path]:
    """Write the files that have another text, and return them."""
    stale = [
        path
        for path, text in texts.items()
        if not path.exists() or path.read_text() != text
    ]
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(texts[path])
    return stale


if __name__ == "__main__":
    sys.exit(main())
