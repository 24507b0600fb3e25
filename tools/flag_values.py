"""Rewrites the values in recipes/env/flag_values.toml from releases' sources.

`python -m tools.flag_values FOLDER`: FOLDER holds every supported release as vllm-X.Y.Z. New files
and symbols are put into the table by hand, first; this fails for a release that has neither.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from packaging.version import Version

from patchkit.errors import SourceError
from patchkit.patching.recipe import load_recipe
from patchkit.runtime.rules.flag_values import PLACE, Choices, load_choices

HEAD = """\
# Flags of `vllm serve` with fixed values: where vLLM's code lists them, below the package's folder,
# and what the releases from 0.11.1 on list there: a value, or a value and the range in which it is.
# Written by tools/flag_values.py.
"""


def values(choices: Choices, folder: Path) -> list[str]:
    """``NAME`` or ``NAME RANGE`` for everything that releases list."""
    releases = sorted(load_recipe().supported)
    listed = {
        version: _listed(choices, folder / f"vllm-{version}" / "vllm") for version in releases
    }
    there = [version for version in releases if listed[version]]
    assert there == releases[-len(there) :], f"{choices.flag} came and went"
    names = dict.fromkeys(name for version in there for name in listed[version])
    return sorted(_ranged(name, [name in listed[v] for v in there], there) for name in names)


def _listed(choices: Choices, home: Path) -> tuple[str, ...]:
    try:
        return choices.read(home)
    except SourceError:
        return ()


def _ranged(name: str, has: list[bool], there: list[Version]) -> str:
    first, last = has.index(True), len(has) - 1 - has[::-1].index(True)
    assert all(has[first : last + 1]), f"{name} came and went"
    since = [f">={there[first]}"] if first else []
    until = [f"<{there[last + 1]}"] if last + 1 < len(there) else []
    return f"{name} {','.join(since + until)}".strip()


def text(folder: Path) -> str:
    return HEAD + "".join(_entry(choices, values(choices, folder)) for choices in load_choices())


def _entry(choices: Choices, names: list[str]) -> str:
    listed = textwrap.fill(
        ", ".join(f'"{name}"' for name in names).replace(" ", "\0").replace(",\0", ", "),
        width=118,
        initial_indent="  ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    ).replace("\0", " ")
    files = ", ".join(f'"{name}"' for name in choices.files)
    capitals = "" if choices.capitals else "capitals = false\n"
    return (
        f'\n[[flag]]\nflag = "{choices.flag}"\nfiles = [{files}]\nsymbol = "{choices.symbol}"\n'
        f"{capitals}values = [\n{listed},\n]\n"
    )


if __name__ == "__main__":
    PLACE.write_text(text(Path(sys.argv[1])), encoding="utf-8")
