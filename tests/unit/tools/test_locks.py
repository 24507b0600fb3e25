"""The locks of the project's own sessions, as they are committed; nothing is asked of an index."""

from __future__ import annotations

import re
import shutil
import tomllib

import pytest
from packaging.requirements import Requirement

from tools import locks

PYPROJECT = tomllib.loads((locks.ROOT / "pyproject.toml").read_text())
GROUPS = PYPROJECT["dependency-groups"]


def members(group):
    for entry in GROUPS[group]:
        if isinstance(entry, str):
            yield Requirement(entry)
        else:
            yield from members(entry["include-group"])


def pinned(name):
    """Return name → the versions that a lock has of it. Each line is a pin, a hash or a comment."""
    found = {}
    for line in (locks.ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
        if pin := re.fullmatch(r"([a-z0-9-]+)==([^ ;]+)( ; [^\\]+)? \\", line):
            found.setdefault(pin[1], []).append(pin[2])
        else:
            assert re.fullmatch(r" +--hash=sha256:[0-9a-f]{64}( \\)?| *#.*", line), line
    return found


def test_a_lock_has_what_its_session_asks_for():
    for lock, group, patchkit in (
        ("test", "test", True),
        ("lint", "lint", True),
        ("build", "wheel", True),
        ("wheel", "wheel", True),
        ("ci", "ci", False),
        ("lock", "lock", False),
    ):
        wanted = [*members(group)]
        if patchkit:
            wanted += map(Requirement, PYPROJECT["project"]["dependencies"])
            wanted += map(Requirement, PYPROJECT["build-system"]["requires"])
        found = pinned(lock)
        for each in wanted:
            assert [v for v in found[each.name] if v in each.specifier], each
        assert "://" not in (locks.ROOT / "requirements" / f"{lock}.txt").read_text()


def test_every_lock_is_tested_and_fits_pyproject():
    assert {f"{name}.txt" for name in locks.LOCKS} == {
        file.name for file in (locks.ROOT / "requirements").iterdir()
    }
    assert locks.stale(locks.ROOT) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"pytest>=9"', '"pytest>=10"'),
        ('"click>=8.2"', '"click>=8.3"'),
        ("hatchling>=1.27", "hatchling>=1.30"),
        ('requires-python = ">=3.11.4"', 'requires-python = ">=3.12"'),
    ],
)
def test_a_lock_made_from_something_else_is_stale(tmp_path, before, after):
    shutil.copytree(locks.ROOT / "requirements", tmp_path / "requirements")
    text = (locks.ROOT / "pyproject.toml").read_text()
    assert text.count(before) == 1
    (tmp_path / "pyproject.toml").write_text(text.replace(before, after))
    assert locks.stale(tmp_path) == [*locks.LOCKS]
