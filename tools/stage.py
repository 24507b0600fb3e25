"""A copy of the checkout in which a change is made whole, and the one step that brings it back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from patchkit.digests import sha256_of
from patchkit.durable.journal import Change, Journal
from patchkit.durable.lock import locked

ROOT = Path(__file__).parents[1]
_PARTS = (
    "patchkit",
    "recipes",
    "tools",
    "tests",
    "docs",
    "README.md",
    "pyproject.toml",
)
_WRITTEN = ("recipes", "tests/data", "docs", "README.md")
_IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc")


@contextmanager
def staged(root: Path = ROOT) -> Iterator[Path]:
    """Copy what tables and pages are made of into a folder that goes away."""
    with tempfile.TemporaryDirectory(prefix="patchkit-stage-") as folder:
        stage = Path(folder) / "checkout"
        stage.mkdir()
        for part in _PARTS:
            if (root / part).is_dir():
                # patchkit/recipes is a link to recipes/, and has to stay one.
                shutil.copytree(
                    root / part, stage / part, symlinks=True, ignore=_IGNORED
                )
            else:
                shutil.copy2(root / part, stage / part)
        yield stage


def run_in(stage: Path, *arguments: str) -> int:
    """Run a module of tools/ on the copy, and return its exit code."""
    # The copy before this checkout; tests/ for `support`, which some tools import.
    path = os.pathsep.join((str(stage), str(stage / "tests")))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=stage, env=environment
    )
    return done.returncode


def differences(root: Path, stage: Path) -> list[Change]:
    """Return the changes that make the checkout what the copy is."""
    paths = sorted({path for each in (root, stage) for path in _files(each)})
    return [
        Change(path, before, (stage / path).read_bytes() if after else None)
        for path in paths
        if (before := _digest(root / path)) != (after := _digest(stage / path))
    ]


def bring_back(stage: Path, root: Path = ROOT) -> list[str]:
    """Make all changes or none, and return their paths; the next run finishes a killed one."""
    with locked(root):
        journal = _journal(root)
        journal.recover()
        changes = differences(root, stage)
        journal.commit(changes)
    return [each.path for each in changes]


def recover(root: Path = ROOT) -> None:
    """Finish or take back what an earlier run left half done."""
    with locked(root):
        _journal(root).recover()


def _journal(root: Path) -> Journal:
    folder = root / ".stage"
    return Journal(
        root=root,
        folder=folder / "journal",
        home=folder,
        again="run it again",
        rescue="git checkout recipes tests/data docs README.md",
    )


def _files(root: Path) -> Iterator[str]:
    for part in _WRITTEN:
        place = root / part
        found = place.rglob("*") if place.is_dir() else (place,)
        for path in found:
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(root).as_posix()


def _digest(path: Path) -> str:
    return sha256_of(path) if path.is_file() else ""
