"""The sessions of the noxfile, as text: nothing is installed or run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
NOXFILE = (ROOT / "noxfile.py").read_text(encoding="utf-8")


def test_every_program_that_a_session_runs_is_there():
    modules = re.findall(r'_module\(session, "([\w.]+)"', NOXFILE)
    assert len(modules) > 10
    for name in modules:
        folder = ROOT if name.startswith("tools.") else ROOT / "tests"
        place = folder / name.replace(".", "/")
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), name
