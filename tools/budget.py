"""Count what each room weighs, and hold code, names and pages against tools/budget.toml.

    python -m tools.budget [--names ROOM | --worst COUNT]

``--names`` lists a room's functions that other modules name alike, ``--worst`` the functions
that decide most.
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

from tools.readability import Counts, count_modules

HOME = Path(__file__).parents[1]
_WINGS = ("source", "wheel", "runtime", "cluster", "doctor", "cli")
_FOLDERS = {
    **{name: name for name in _WINGS},
    **dict.fromkeys(("edit", "patching", "proof"), "patching"),
    "durable": "ground",
}
# <!-- table: COMMAND --> … <!-- /table -->, <!-- recorded --> … <!-- end -->
_WRITTEN = re.compile(r"<!-- ([a-z]+)(?::.*)? -->\n(?s:.*?)<!-- (?:/\1|end) -->")


@dataclass(frozen=True)
class Module:
    """A module with its room, its code tokens, and the names of its functions."""

    path: Path
    room: str
    tokens: int
    functions: tuple[str, ...]
    top_functions: tuple[str, ...]  # without methods and inner functions


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
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    top = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return Module(
        path.relative_to(HOME),
        room,
        count_modules([path], HOME).tokens,
        tuple(node.name for node in functions),
        tuple(node.name for node in top),
    )


def room_weights() -> dict[str, int]:
    """Return the code tokens of each room."""
    weights: Counter[str] = Counter()
    for module in modules():
        weights[module.room] += module.tokens
    return dict(weights)


@cache
def counted(*folders: str) -> Counts:
    """Return what is counted in the Python files of these folders."""
    return count_modules(python_files(*folders), HOME)


def air_figures(*folders: str) -> dict[str, float]:
    """Return the figures of [air] for these folders."""
    return counted(*folders).figures(limits()["names"]["pronouns"].split())


def worsened(figures: dict[str, float], table: dict[str, Any]) -> dict[str, float]:
    """Return the figures that are worse than the ratchet of [air] allows."""
    worse = {}
    for name, row in table.items():
        if row.get("least"):
            is_within = figures[name] >= min(row["aim"], row.get("last", row["aim"]))
        else:
            is_within = figures[name] <= max(row["aim"], row.get("last", row["aim"]))
        if not is_within:
            worse[name] = figures[name]
    return worse


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
    paths = {module.path for module in modules() if module.room == room}
    for name, places in shared_names().items():
        if paths & set(places):
            print(f"{name}: {', '.join(map(str, places))}")


def _print_worst(count: int) -> None:
    functions = counted("patchkit", "recipes").functions
    functions.sort(key=lambda function: -function.decisions)
    for function in functions[:count]:
        print(f"{function.decisions:4}  {function.place}")


def _print_figures() -> None:
    weights = room_weights()
    for room, tokens in sorted(weights.items(), key=lambda item: -item[1]):
        print(f"{room:12}{tokens:9,}")

    table = limits()["air"]
    ours = air_figures("patchkit", "recipes")
    rest = air_figures("tests", "tools", "benchmarks")
    print(f"\n{'':12}{'code':>9}{'aim':>9}{'tests, tools':>14}")
    for name, row in table.items():
        print(f"{name:12}{ours[name]:>9,}{row['aim']:>9,}{rest[name]:>14,}")

    print()
    for name, figure in {**name_figures(), **page_figures()}.items():
        limit = {**limits()["names"], **limits()["docs"]}.get(name, "-")
        print(f"{name:12}{figure:>9,}{limit:>9}")


def main(arguments: list[str]) -> None:
    """Print figures beside their limits, a room's names, or the functions that decide most."""
    match arguments:
        case ["--names", room]:
            _print_names(room)
        case ["--worst", count]:
            _print_worst(int(count))
        case _:
            _print_figures()


if __name__ == "__main__":
    main(sys.argv[1:])
