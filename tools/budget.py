"""Count what each room weighs, and hold names and pages against tools/budget.toml.

    python -m tools.budget [--names ROOM]

``--names`` lists a room's functions that other modules name alike, and its small helpers.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

HOME = Path(__file__).parents[1]
_WINGS = ("source", "wheel", "runtime", "cluster", "doctor", "cli")
_FOLDERS = {
    **{name: name for name in _WINGS},
    **dict.fromkeys(("edit", "patching", "proof"), "patching"),
    "durable": "ground",
}
# <!-- table: COMMAND --> … <!-- /table -->, <!-- recorded --> … <!-- end -->
_WRITTEN = re.compile(r"<!-- ([a-z]+)(?::.*)? -->\n(?s:.*?)<!-- (?:/\1|end) -->")
_SMALL = 6  # lines of a helper that might as well stand where it is called


@dataclass(frozen=True)
class Module:
    """A module with its room, its lines, and the names of its functions."""

    path: Path
    room: str
    lines: int
    functions: tuple[str, ...]
    top_functions: tuple[str, ...]  # without methods and inner functions
    small_helpers: tuple[str, ...]


def limits() -> dict[str, Any]:
    """Return the limits that tools/budget.toml sets."""
    return tomllib.loads((HOME / "tools" / "budget.toml").read_text(encoding="utf-8"))


def python_files(*folders: str) -> Iterator[Path]:
    """Yield the Python files of folders; links are not followed."""
    for folder in folders:
        yield from (
            path for path in sorted((HOME / folder).rglob("*.py")) if _is_ours(path)
        )


def _is_ours(path: Path) -> bool:
    inside = path.relative_to(HOME)
    return (
        inside.parts[:2] != ("patchkit", "recipes")
        and "__pycache__" not in inside.parts
    )


def count_lines(folder: str) -> int:
    """Return the lines of Python in a folder."""
    return sum(
        len(path.read_text(encoding="utf-8").splitlines())
        for path in python_files(folder)
    )


def page_figures() -> dict[str, int]:
    """Return the pages below docs/ and their words, without what a tool writes between marks."""
    pages = [path.read_text(encoding="utf-8") for path in (HOME / "docs").glob("*.md")]
    words = sum(len(_WRITTEN.sub("", page).split()) for page in pages)
    return {"pages": len(pages), "words": words}


@cache
def modules() -> tuple[Module, ...]:
    """Return every module of patchkit/ and recipes/."""
    return tuple(_read(path) for path in python_files("patchkit", "recipes"))


def _read(path: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    parts = path.relative_to(HOME).parts
    room = "recipes" if parts[0] == "recipes" else _FOLDERS.get(parts[1], "ground")
    uses = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    )
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    top = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    small = (
        node.name
        for node in functions
        if node.name.startswith("_")
        and not node.name.startswith("__")
        and (node.end_lineno or 0) - node.lineno < _SMALL
        and uses[node.name] == 1
    )
    return Module(
        path.relative_to(HOME),
        room,
        len(text.splitlines()),
        tuple(node.name for node in functions),
        tuple(node.name for node in top),
        tuple(small),
    )


def room_lines() -> dict[str, int]:
    """Return the lines of each room."""
    lines: Counter[str] = Counter()
    for module in modules():
        lines[module.room] += module.lines
    return dict(lines)


def shared_names() -> dict[str, list[Path]]:
    """Return the functions' names that stand in several modules, and in which."""
    found = defaultdict(set)
    for module in modules():
        for name in module.top_functions:
            found[name].add(module.path)
    return {
        name: sorted(paths) for name, paths in sorted(found.items()) if len(paths) > 1
    }


def name_figures() -> dict[str, float]:
    """Return the figures of [names]."""
    names = [name for module in modules() for name in module.functions]
    one_word = sum(
        len([word for word in name.split("_") if word]) == 1 for name in names
    )
    return {
        "shared": len(shared_names()),
        "one_word": round(100 * one_word / len(names), 1),
    }


def _print_names(room: str) -> None:
    mine = [module for module in modules() if module.room == room]
    lines = sum(module.lines for module in mine)
    functions = sum(len(module.functions) for module in mine)
    small = sum(len(module.small_helpers) for module in mine)
    paths = {module.path for module in mine}
    for name, places in shared_names().items():
        if paths & set(places):
            print(f"{name}: {', '.join(map(str, places))}")
    for module in mine:
        if module.small_helpers:
            print(
                f"small, one caller: {module.path}: {', '.join(module.small_helpers)}"
            )
    per = [f"{1000 * count / lines:.1f}" for count in (functions, small)]
    print(f"{lines} lines, per 1,000: {per[0]} functions, {per[1]} small helpers")


def main(arguments: list[str]) -> None:
    """Print what rooms weigh and figures beside their limits, or a room's names."""
    if arguments[:1] == ["--names"]:
        _print_names(arguments[1])
        return
    rooms = room_lines()
    weights = {
        **rooms,
        "all": sum(rooms.values()),
        "tests": count_lines("tests"),
        "tools": count_lines("tools"),
    }
    for name, lines in weights.items():
        print(f"{name:14} {lines:>9} lines")

    for table, figures in (("names", name_figures()), ("docs", page_figures())):
        for name, limit in limits()[table].items():
            over = "" if figures[name] <= limit else "  over"
            print(f"{name:14} {figures[name]:>9} of {limit:>6}{over}")


if __name__ == "__main__":
    main(sys.argv[1:])
