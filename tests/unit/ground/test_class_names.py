"""One name, one thing: no two modules have a class of the same name."""

from __future__ import annotations

import ast
from pathlib import Path

from tools import architecture


def classes(sources):
    """Class name → the modules that define it."""
    found = {}
    for module, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    return found


def test_a_name_that_two_modules_have_is_found():
    sources = {"a": "class One: ...", "b": "def f():\n    class One: ...\nclass Two: ..."}
    assert classes(sources) == {"One": ["a", "b"], "Two": ["b"]}


def test_each_class_has_a_name_of_its_own():
    sources = {
        name: Path(path).read_text(encoding="utf-8")
        for name, path in architecture.modules().items()
    }
    found = classes(sources)
    assert len(found) > 200
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}
