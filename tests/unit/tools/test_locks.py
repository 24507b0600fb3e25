"""The locks of the project's own sessions, as they are committed; nothing is asked of an index."""

from __future__ import annotations

import shutil

import pytest

from tools import locks


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
