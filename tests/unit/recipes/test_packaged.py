"""Recipes in a wheel: a package below patchkit, each file once, the same from every source."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]


@pytest.fixture
def build(tmp_path):
    """Build a ``wheel`` or an ``sdist`` of a folder, with the build backend alone."""
    pytest.importorskip("hatchling", reason="hatchling is not installed")

    def run(kind, folder):
        dest = tmp_path / f"{kind}-of-{folder.name}"
        command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", dest]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (made,) = dest.iterdir()
        return made

    return run


@pytest.mark.e2e
@pytest.mark.skipif(not (CHECKOUT / "recipes").is_dir(), reason="not a checkout")
def test_a_wheel_holds_the_recipes_once_whatever_it_is_made_of(build, tmp_path):
    wheel = build("wheel", CHECKOUT)
    with tarfile.open(build("sdist", CHECKOUT)) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
        links = [member.name for member in archive if not member.isfile()]
    (unpacked,) = (tmp_path / "sdist").iterdir()
    with zipfile.ZipFile(wheel) as members:
        names = members.namelist()

    assert links == []
    assert len(set(names)) == len(names)
    folders = {name.partition("/")[0] for name in names}
    assert [folder for folder in folders if not folder.endswith(".dist-info")] == ["patchkit"]
    recipes = {
        str(path.relative_to(CHECKOUT))
        for path in (CHECKOUT / "recipes").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {n.removeprefix("patchkit/") for n in names if "/recipes/" in n} == recipes
    assert build("wheel", unpacked).read_bytes() == wheel.read_bytes()
