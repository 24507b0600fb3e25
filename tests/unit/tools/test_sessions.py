"""The sessions of the noxfile, as text: nothing is installed or run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
NOXFILE = (ROOT / "noxfile.py").read_text(encoding="utf-8")


def test_every_program_that_a_session_runs_is_there():
    named = re.findall(r'_tool\(session, "([\w.]+)"', NOXFILE)
    assert len(named) > 10
    for name in named:
        place = ROOT / "tools" / name.replace(".", "/")
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), name


def test_programs_that_take_what_tests_share_are_run_so_that_they_find_it():
    """`_tool` sets the path; any other way of running them does not."""
    otherwise = set(re.findall(r'"-m",\s*"tools\.([\w.]+)"', NOXFILE))
    for name in otherwise:
        text = (ROOT / "tools" / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")
        modules = [n.module for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)]
        assert not [each for each in modules if each and each.partition(".")[0] == "support"]
