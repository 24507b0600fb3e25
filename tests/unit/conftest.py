"""Build what several unit tests take: trees of a few files, machines, keys of ssh-keygen."""

import shutil
import subprocess

import pytest
from packaging.version import Version

from patchkit.runtime.host.probe import probe
from patchkit.source.tree import SourceTree
from support import hosts


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


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """The facts of a machine of hosts.py: ``machine("ring", 2)``."""
    folder = tmp_path_factory.mktemp("hosts")

    def found(name, node=0):
        root = folder / f"{name}-{node}"
        root = root if root.exists() else hosts.build(folder, name, node=node)
        return probe(root, environment={})

    return found


@pytest.fixture
def copied(tmp_path):
    """A machine whose files a test may change."""
    return hosts.build(tmp_path, "cable_port0")


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Private keys of alice and mallory, made now; public ones lie beside them.

    Skips where there is no ssh-keygen.
    """
    if not shutil.which("ssh-keygen"):
        pytest.skip("ssh-keygen is not installed (Debian: openssh-client)")
    folder = tmp_path_factory.mktemp("keys")
    for name in ("alice", "mallory"):
        words = ["-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
        subprocess.run(["ssh-keygen", *words], check=True, capture_output=True)
    return folder
