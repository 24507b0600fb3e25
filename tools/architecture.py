"""The picture and the table of rooms in docs/architecture.md, drawn from the imports.

    python -m tools.architecture            writes them anew (`nox -s regenerate` does so, too)

The page shows the eleven rooms: the folders of patchkit/, and as the ground the modules beside them
with durable/. Tests look into the rooms as well, folder by folder. An arrow means: imports from.
Arrows that follow from others are left out.
"""

from __future__ import annotations

import ast
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import patchkit
from tools.markdown import replaced

HOME = Path(__file__).parents[1]
PAGE = HOME / "docs" / "architecture.md"
PACKAGE = Path(patchkit.__file__).parent
GROUND = "ground"
_IN_GROUND = ("durable",)
_PROVED = (
    "apply"  # the module that plans, proves and commits: it is shown with the proofs
)
_Graph = Mapping[str, set[str]]  # room → the rooms that it imports from


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Return every module's dotted name below the package, ``wheel.file.record``, and its file."""
    found = {}
    for folder, _, names in os.walk(package, followlinks=True):  # recipes/ is a link
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            words = path.relative_to(package).with_suffix("").parts
            found[".".join(words[:-1] if words[-1] == "__init__" else words)] = path
    return dict(sorted(found.items()))


def room_of(module: str, known: Mapping[str, Path]) -> str:
    """Return the room of a module; a package is in its own."""
    if known[module].name == "__init__.py" or module == "apply":
        return module
    return module.rpartition(".")[0] or GROUND


def imports(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules of the package that a file imports, within functions as well."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [
                node.module,
                *(f"{node.module}.{alias.name}" for alias in node.names),
            ]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        inside = [
            name.removeprefix("patchkit.")
            for name in names
            if name.startswith("patchkit.")
        ]
        yield from (name for name in inside if name in known)


@cache
def folders() -> dict[str, set[str]]:
    """Return each folder with those that it imports from. Folders of folders are none."""
    known = modules()
    known.pop("__main__", None)
    sizes = Counter(room_of(module, known) for module in known)
    kept = {room for room, size in sizes.items() if size > 1 or room == "apply"}
    found: dict[str, set[str]] = {room: set() for room in sorted(kept)}
    for module, path in known.items():
        if (room := room_of(module, known)) in kept:
            found[room] |= {room_of(name, known) for name in imports(path, known)}
    return {room: targets & kept - {room} for room, targets in found.items()}


@cache
def rooms() -> dict[str, set[str]]:
    """Return each of the eleven rooms with the rooms that it imports from."""
    known = modules()
    known.pop("__main__", None)
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        room = found.setdefault(wide_room(module, known), set())
        room |= {wide_room(name, known) for name in imports(path, known)}
    return {room: targets - {room} for room, targets in sorted(found.items())}


def wide_room(module: str, known: Mapping[str, Path]) -> str:
    """Return which of the eleven rooms a module is in."""
    head, _, rest = module.partition(".")
    if head == _PROVED:
        return "proof"
    is_folder = bool(rest) or known[module].name == "__init__.py"
    return head if is_folder and head and head not in _IN_GROUND else GROUND


def floors(graph: _Graph) -> dict[str, int]:
    """Return each room's floor, counted from the ground. Raises graphlib.CycleError."""
    number: dict[str, int] = {}
    for room in TopologicalSorter(graph).static_order():
        number[room] = max((number[below] + 1 for below in graph[room]), default=0)
    return number


def arrows(graph: _Graph) -> Iterator[tuple[str, str]]:
    """Yield the imports that do not follow from others."""
    reach: dict[str, set[str]] = {}
    for room in TopologicalSorter(graph).static_order():
        reach[room] = graph[room].union(*(reach[below] for below in graph[room]))
    for room in sorted(graph):
        for below in sorted(graph[room]):
            # A transitive reduction: what a room that it imports reaches needs no arrow.
            if not any(below in reach[other] for other in graph[room] - {below}):
                yield room, below


def _sentence(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split(
        "\n"
    )[0]


def picture(graph: _Graph) -> str:
    """Return the picture as Mermaid's flowchart."""
    lines = ["```mermaid", "flowchart TD"]
    lines += [f'  {_node(room)}["{room}"]' for room in graph]
    lines += [f"  {_node(room)} --> {_node(below)}" for room, below in arrows(graph)]
    return "\n".join([*lines, "```"])


def _node(room: str) -> str:
    return room.replace(".", "_") + "_"  # "end" alone would be a word of Mermaid's


def table(graph: _Graph) -> str:
    """Return the rooms with what each is for, from the ground up."""
    number = floors(graph)
    rows = ["| floor | room | what it is for |", "|--:|---|---|"]
    for room in sorted(graph, key=lambda room: (number[room], room)):
        place = PACKAGE / room / "__init__.py"
        says = "One of each: see below." if room == GROUND else _sentence(place)
        rows.append(f"| {number[room]} | `{room}` | {says} |")
    return "\n".join(rows)


def page(text: str) -> str:
    """Return the page with its picture and its table as they are now."""
    graph = rooms()
    for name, made in (("picture", picture(graph)), ("rooms", table(graph))):
        text = replaced(text, name, "python -m tools.architecture", made)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
