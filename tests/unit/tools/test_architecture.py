"""The structure, read from the imports: no circle, no way up, no barn; and its page."""

from __future__ import annotations

import re

import pytest

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


@pytest.mark.parametrize("folder", BELOW)
def test_nothing_is_imported_upwards(folder):
    graph = architecture.rooms()
    rooms = [room for room in graph if room.partition(".")[0] == folder]
    assert rooms
    for room in rooms:
        assert not {below for below in graph[room] if below.partition(".")[0] in BELOW[folder]}


@pytest.mark.parametrize("room", [room for room in architecture.rooms() if "fixes" not in room])
def test_no_room_is_a_barn(room):
    files = [path for name, path in MODULES.items() if architecture.room_of(name, MODULES) == room]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert len(files) <= FILES, f"{len(files)} files"
    assert lines <= LINES, f"{lines} lines"


def test_every_folder_says_what_it_is_for():
    packages = [path for path in MODULES.values() if path.name == "__init__.py"]
    assert len(packages) > len(BELOW)
    for path in packages:
        assert re.match(r'"""\w.{20,}[.`]', path.read_text(encoding="utf-8")), path
