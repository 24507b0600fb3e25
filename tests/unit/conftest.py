"""What several unit tests build: trees of a few files, and git without the user's settings."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from packaging.version import Version

from patchkit.patching.fix import Request
from patchkit.source.tree import SourceTree
from patchkit.target import targets


@pytest.fixture
def make_tree(tmp_path):
    """Write files and return the SourceTree that holds them: ``make_tree("0.19.1", files)``."""

    def make(version, files, *, kind="sdist", name="tree"):
        root = tmp_path / name
        for path, text in files.items():
            place = root / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
        return SourceTree(root=root, project="vllm", version=Version(version), kind=kind)

    return make


@pytest.fixture(scope="session")
def ask():
    """A request for a target: ``ask(arch="family", skip={"x"})``."""

    def make(*, target="gb10", arch="native", **selection):
        chosen = {name: frozenset(ids) for name, ids in selection.items()}
        return Request(target=targets()[target], arch=arch, **chosen)

    return make


@pytest.fixture(scope="session")
def git():
    """Run git in a folder: ``git(folder, "apply", stdin=diff)``. Returns what it prints."""
    settings = {
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@localhost",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@localhost",
    }
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}

    def run(folder: Path, *arguments, stdin=""):
        # The ceiling keeps git apply from looking for a repository around the temporary folder.
        env = {**inherited, **settings, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
        result = subprocess.run(
            ["git", *arguments], cwd=folder, env=env, input=stdin.encode(), capture_output=True
        )
        assert result.returncode == 0, f"git {arguments}: {result.stderr.decode()}"
        return result.stdout.decode().strip()

    return run
