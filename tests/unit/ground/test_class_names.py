"""One name, one thing: no two modules have a class of the same name."""

import ast
from collections import defaultdict
from pathlib import Path

from tools import architecture


def test_each_class_has_a_name_of_its_own():
    places = defaultdict(list)
    for name, path in architecture.modules().items():
        for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert len(places) > 200
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}
