"""Which libraries are missing, and the command that installs them."""

from __future__ import annotations

import importlib.metadata
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from patchkit.errors import HostError
from patchkit.extras import BASE, require_base, require_extra

REPOSITORY = Path(__file__).parents[3]


def test_the_libraries_are_those_of_the_dependencies():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    distributions = {line.partition(">")[0] for line in project["dependencies"]}
    brought = importlib.metadata.packages_distributions()
    assert {brought[name][0] for name in BASE} == distributions - {"click"}
    require_base()


def test_an_extra_that_is_missing_is_told_with_a_command(tmp_path, monkeypatch):
    (tmp_path / "patchkit_test_tool").mkdir()  # a folder build/ is no module either
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HostError, match=r"^not installed: patchkit_test_tool\n") as caught:
        require_extra("build", "packaging", "patchkit_test_tool")
    assert shlex.split(caught.value.hint) == [
        *(sys.executable, "-m", "pip", "install", f"{REPOSITORY}[build]")
    ]
