"""The structure, read from the imports: no circle, no way up, no barn; and its page."""

from __future__ import annotations

import re
from collections import defaultdict

from tools import architecture

MODULES = architecture.modules()
FILES, LINES = 25, 2500  # of a room
PATCHING = ("edit", "source", "patching", "proof", "apply", "recipes")
BELOW = {  # what no room of these folders may import
    "runtime": ("cluster", "doctor", "measure", *PATCHING, "wheel", "cli"),
    "cluster": ("doctor", "measure", *PATCHING, "wheel", "cli"),
    "doctor": ("measure", *PATCHING, "wheel", "cli"),
    "measure": (*PATCHING, "cli"),
    "wheel": ("runtime", "cluster", "doctor", "measure", "cli"),
    "patching": ("proof", "apply", "wheel", "runtime", "cli", "recipes"),
    "proof": ("apply", "wheel", "runtime", "cli", "recipes"),
}


def test_there_is_no_circle_and_the_page_is_up_to_date():
    graph = architecture.rooms()
    assert architecture.floors(graph)["ground"] == 0  # raises CycleError for a circle
    text = architecture.PAGE.read_text(encoding="utf-8")
    assert architecture.page(text) == text, "run python -m tools.architecture"


def test_nothing_is_imported_upwards():
    graph = architecture.rooms()
    tops = {room: room.partition(".")[0] for room in graph}
    assert {*BELOW} <= {*tops.values()}
    upwards = [
        (room, other)
        for room in graph
        for other in graph[room]
        if other.partition(".")[0] in BELOW.get(tops[room], ())
    ]
    assert upwards == []


def test_no_room_is_a_barn():
    files_of = defaultdict(list)
    for name, path in MODULES.items():
        files_of[architecture.room_of(name, MODULES)].append(path)
    for room in architecture.rooms():
        texts = [path.read_text(encoding="utf-8") for path in files_of[room]]
        lines = sum(len(text.splitlines()) for text in texts)
        is_barn = len(texts) > FILES or lines > LINES
        assert not is_barn or "fixes" in room, f"{room}: {len(texts)} files, {lines} lines"


def test_every_folder_says_what_it_is_for():
    packages = [path for path in MODULES.values() if path.name == "__init__.py"]
    assert len(packages) > len(BELOW)
    for path in packages:
        assert re.match(r'"""\w.{20,}[.`]', path.read_text(encoding="utf-8")), path
