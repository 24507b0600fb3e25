"""Hold the structure, read from the imports: no circle, no way up; and its page."""

import ast
import re
from collections import defaultdict

from tools import architecture

MODULES = architecture.modules()
PATCHING = ("edit", "source", "patching", "proof", "apply", "recipes")
BELOW = {  # what no room of these folders may import
    "runtime": ("cluster", "doctor", *PATCHING, "wheel", "cli"),
    "cluster": ("doctor", *PATCHING, "wheel", "cli"),
    "doctor": (*PATCHING, "wheel", "cli"),
    "wheel": ("runtime", "cluster", "doctor", "cli"),
    "patching": ("proof", "apply", "wheel", "runtime", "cli", "recipes"),
    "proof": ("apply", "wheel", "runtime", "cli", "recipes"),
}


def test_there_is_no_circle_and_the_page_is_up_to_date():
    for graph in (architecture.rooms(), architecture.folders()):
        assert (
            architecture.floors(graph)["ground"] == 0
        )  # raises CycleError for a circle
    assert len(architecture.rooms()) == 11
    text = architecture.PAGE.read_text(encoding="utf-8")
    assert architecture.page(text) == text, "run python -m tools.architecture"


def test_nothing_is_imported_upwards():
    graph = architecture.folders()
    tops = {room: room.partition(".")[0] for room in graph}
    assert {*BELOW} <= {*tops.values()}
    upwards = [
        (room, other)
        for room in graph
        for other in graph[room]
        if other.partition(".")[0] in BELOW.get(tops[room], ())
    ]
    assert upwards == []


def test_each_class_has_a_name_of_its_own():
    places = defaultdict(list)
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert len(places) > 200
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def test_every_folder_says_what_it_is_for():
    packages = [path for path in MODULES.values() if path.name == "__init__.py"]
    assert len(packages) > len(BELOW)
    for path in packages:
        assert re.match(r'"""\w.{20,}[.`]', path.read_text(encoding="utf-8")), path
