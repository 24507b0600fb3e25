"""The locks of what building vLLM takes are made again as they are; needs a package index."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from patchkit.errors import HostError
from patchkit.wheel.build.requirements import read_requirements
from tools.build_requirements import FOLDER, lock

RELEASE = """\
[build-system]
requires = ["ninja", "torch == 2.11.0"]
[project]
requires-python = ">=3.10,<3.15"
"""


def test_what_is_locked_stays_and_what_is_not_needed_goes(tmp_path):
    (tmp_path / "pyproject.toml").write_text(RELEASE)
    known = Path(shutil.copy(FOLDER / "torch-2.11.0.txt", tmp_path))
    before = {each.name: each for each in read_requirements(known)}
    try:
        path = lock(tmp_path / "pyproject.toml", tmp_path)
    except HostError as error:
        pytest.skip(error.what)
    assert path == known
    after = {each.name: each for each in read_requirements(path)}
    assert after == {name: before[name] for name in after}
    assert {"ninja", "torch", "nvidia-nccl-cu13", "jinja2"} <= after.keys()
    assert "setuptools-rust" not in after
    assert path.read_text().splitlines()[1] == "# Made by tools/build_requirements.py."
