"""What several unit tests build: trees of a few files, and git without the user's settings."""

from __future__ import annotations

import pytest
from packaging.version import Version

from patchkit.patching.fix import Request
from patchkit.source.tree import SourceTree
from patchkit.target import targets


@pytest.fixture
def make_tree(tmp_path):
    """Write files and return the SourceTree that holds them: ``make_tree("0.19.1", files)``."""

    def make(version, files, *, kind="sdist", name="tree", project="vllm"):
        root = tmp_path / name
        for path, text in files.items():
            place = root / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
        return SourceTree(root=root, project=project, version=Version(version), kind=kind)

    return make


@pytest.fixture(scope="session")
def ask():
    """A request for a target: ``ask(arch="family", skip={"x"})``."""

    def make(*, target="gb10", arch="native", **selection):
        chosen = {name: frozenset(ids) for name, ids in selection.items()}
        return Request(target=targets()[target], arch=arch, **chosen)

    return make
