"""The tables made from releases' sources: changed for some releases, kept for the others.

What a table says of a release is read back from its rows, so that nothing but the releases in
question is needed to write it anew.
"""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from packaging.version import Version

from patchkit.errors import SourceError
from patchkit.records import RECIPES
from patchkit.runtime.rules.presets import FLAGS, MODELS, VALUES, Choices, load_choices
from patchkit.runtime.rules.releases import read_table
from patchkit.runtime.rules.variable_values import TAKEN
from tools.seen import MODES, Entry, Row, Seen

DATA = Path(__file__).parents[1] / "tests" / "data"
VARIABLES = RECIPES / "env" / "vllm_variables.tsv"
STOCK = RECIPES / "vllm" / "stock_archs.csv"
SUPPORT = RECIPES / "vllm" / "support.json"
FILES = RECIPES / "vllm" / "release_files.tsv"
ARCHS = DATA / "archs.csv"
Support = dict[str, dict[str, dict[str, str]]]
"""fix → arch mode → release → level"""
ARCH_COLUMNS = ("release", "arch", "group", "file", "variable", "stock", "patched")
STOCK_COLUMNS = ("since", "until", "group", "switches", "variable", "archs")
VARIABLES_HEAD = (
    "name, first release, last release, default: the environment variables in envs.py of each",
    "supported release of vLLM. Made by tools/regenerate.py. An empty default: not set; some are",
    "computed, and stand here as the code has them.",
)
TAKEN_HEAD = (
    "name, first release, last release, values: what the variables in envs.py of each supported",
    "release of vLLM take; one that is not here takes anything. Made by tools/regenerate.py.",
    "one of, some of (several, with commas), integer, number: vLLM stops at anything else.",
)
FLAGS_HEAD = (
    "flag, first release, last release: what `vllm serve` takes in each supported release. Made by",
    "tools/regenerate.py.",
)
MODELS_HEAD = (
    "model, first release, last release, the oldest vLLM that its recipe names, in recipes of each",
    "release; model and vram_minimum_gb; for what is meant for a GB10 also model and flag or",
    "variable, with the value there. Made by tools/regenerate.py.",
)
FILES_HEAD = (
    "file, first release, last release, how its sha256 begins: what fixes look at in each release,",
    "empty where it has no such file. A tree in which one differs is not that release, whatever",
    "its tag says. Made by tools/regenerate.py.",
)
VALUES_HEAD = """\
# Flags of `vllm serve` with fixed values: where vLLM's code lists them, below the package's folder,
# and what the releases from 0.11.1 on list there: a value, or a value and the range in which it is.
# Written by tools/regenerate.py; a new flag is entered by hand, with its files and symbol.
"""


def updated(
    seen: Iterable[Seen],
    releases: Sequence[str],
    fixes: Sequence[str],
    support: Support,
) -> dict[Path, str]:
    """Return path → text of every table of ``releases``, oldest first.

    ``seen`` are those to change; ``support`` is what is known of the others. Raises SourceError for
    a fix of which nothing is known.
    """
    news = {each.version: each for each in seen}
    variables = kept_rows(
        VARIABLES, releases, {v: each.variables for v, each in news.items()}
    )
    taken = kept_rows(TAKEN, releases, {v: each.taken for v, each in news.items()})
    flags = kept_rows(FLAGS, releases, {v: each.flags for v, each in news.items()})
    models = kept_rows(MODELS, releases, {v: each.models for v, each in news.items()})
    return {
        VARIABLES: render(variables, VARIABLES_HEAD),
        TAKEN: render(taken, TAKEN_HEAD),
        FLAGS: render(flags, FLAGS_HEAD),
        MODELS: render(models, MODELS_HEAD),
        FILES: render(
            kept_rows(FILES, releases, {v: each.files for v, each in news.items()}),
            FILES_HEAD,
        ),
        VALUES: VALUES_HEAD
        + "".join(_flag(each, news, releases) for each in load_choices().values()),
        STOCK: _stock(news, releases),
        SUPPORT: json.dumps(_support(news, releases, fixes, support), indent=1) + "\n",
        ARCHS: _rows(
            ARCHS, ARCH_COLUMNS, {v: each.archs for v, each in news.items()}, releases
        ),
    }


def render(releases: Mapping[str, Mapping[str, str]], heading: Sequence[str]) -> str:
    """Return the text of a table; ``releases`` is release → name → default, oldest first."""
    names = list(releases)
    rows: dict[str, list[list[str]]] = {}
    for before, version in zip([None, *names], names, strict=False):
        for name, default in releases[version].items():
            known = rows.setdefault(name, [])
            # A row goes on while its default stays; a gap or a new default begins another.
            if known and known[-1][1:] == [before, default]:
                known[-1][1] = version
            else:
                known.append([version, version, default])
    lines = [
        f"{name}\t{chr(9).join(row)}" for name in sorted(rows) for row in rows[name]
    ]
    return "".join(f"{line}\n" for line in [*(f"# {line}" for line in heading), *lines])


def read_rows(path: Path) -> list[Row]:
    """Read a CSV file with a heading."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _rendered(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([columns, *rows])
    return file.getvalue()


def kept_rows(
    path: Path, releases: Sequence[str], news: Mapping[str, Mapping[str, str]]
) -> dict[str, Mapping[str, str]]:
    """Return release → name → default: of a table that is there, and of ``news``."""
    rows = read_table(path).rows
    return {
        version: news[version]
        if version in news
        else {
            row.name: row.default
            for row in rows
            if _between(row.first, version, row.last)
        }
        for version in releases
    }


def _between(first: str, version: str, last: str) -> bool:
    return Version(first) <= Version(version) <= Version(last)


def _stock(news: Mapping[str, Seen], releases: Sequence[str]) -> str:
    """Return one row per run of releases that agree."""
    known = read_rows(STOCK)
    rows: list[list[str]] = []
    running: dict[tuple[Entry, int], list[str]] = {}
    for version in releases:
        entries = (
            news[version].stock
            if version in news
            else [
                _entry(row)
                for row in known
                if _between(row["since"], version, row["until"])
            ]
        )
        now = _numbered(entries)
        running = {entry: row for entry, row in running.items() if entry in now}
        for entry in now:
            if entry not in running:
                (group, switches, variable, archs), _number = entry
                running[entry] = [
                    version,
                    version,
                    group,
                    switches,
                    variable,
                    ";".join(archs),
                ]
                rows.append(running[entry])
            running[entry][1] = version
    return _rendered(STOCK_COLUMNS, rows)


def _entry(row: Row) -> Entry:
    archs = tuple(filter(None, row["archs"].split(";")))
    return row["group"], row["switches"], row["variable"], archs


def _numbered(entries: Sequence[Entry]) -> list[tuple[Entry, int]]:
    """Count those that agree in all but their archs."""
    return [
        (entry, sum(other[:3] == entry[:3] for other in entries[:number]))
        for number, entry in enumerate(entries)
    ]


def _support(
    news: Mapping[str, Seen],
    releases: Sequence[str],
    fixes: Sequence[str],
    known: Support,
) -> Support:
    def level(fix: str, mode: str, version: str) -> str:
        if version in news:
            return news[version].support[fix][mode]
        if fix not in known:
            raise SourceError(
                f"{fix}: no release was asked whether it needs this fix",
                hint=f"nox -s regenerate -- --fix {fix}",
            )
        return known[fix][mode][version]

    return {
        fix: {
            mode: {each: level(fix, mode, each) for each in releases} for mode in MODES
        }
        for fix in fixes
    }


def _rows(
    path: Path,
    columns: Sequence[str],
    news: Mapping[str, list[Row]],
    releases: Sequence[str],
) -> str:
    """Return a table of releases one after another; those without news keep their rows."""
    known: dict[str, list[Row]] = {}
    for row in read_rows(path):
        known.setdefault(row["release"], []).append(row)
    found = {**known, **news}
    rows = (row for version in releases for row in found[version])
    return _rendered(columns, ([row[each] for each in columns] for row in rows))


def _flag(choices: Choices, news: Mapping[str, Seen], releases: Sequence[str]) -> str:
    listed = {
        version: news[version].values[choices.flag]
        if version in news
        else choices.allowed_by(version).words
        for version in releases
    }
    # A release that was read and lists nothing does not have the flag.
    there = [version for version in releases if listed[version] or version not in news]
    names = dict.fromkeys(name for version in there for name in listed[version])
    lines = sorted(
        _ranged(name, [name in listed[v] for v in there], there) for name in names
    )
    files = ", ".join(f'"{name}"' for name in choices.files)
    capitals = "" if choices.capitals else "capitals = false\n"
    return (
        f'\n[[flag]]\nflag = "{choices.flag}"\nfiles = [{files}]\nsymbol = "{choices.symbol}"\n'
        f"{capitals}values = [\n{_wrapped(lines)},\n]\n"
    )


def _wrapped(values: Iterable[str]) -> str:
    """Return quoted values in lines of 118 columns, broken between values alone."""
    # textwrap breaks lines at spaces: those within a value are NULs meanwhile.
    glued = (
        ", ".join(f'"{value}"' for value in values)
        .replace(" ", "\0")
        .replace(",\0", ", ")
    )
    return textwrap.fill(
        glued,
        width=118,
        initial_indent="  ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    ).replace("\0", " ")


def _ranged(name: str, has: Sequence[bool], there: Sequence[str]) -> str:
    first, last = has.index(True), len(has) - 1 - list(reversed(has)).index(True)
    if not all(has[first : last + 1]):
        raise ValueError(f"{name} came and went")
    since = [f">={there[first]}"] if first else []
    until = [f"<{there[last + 1]}"] if last + 1 < len(there) else []
    return f"{name} {','.join(since + until)}".strip()
