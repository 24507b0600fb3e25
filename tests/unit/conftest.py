"""Build what several unit tests take: trees of a few files, and machines."""

from functools import cache

import pytest
from packaging.version import Version

from patchkit.runtime.host.probe import probe
from patchkit.source.tree import SourceTree
from support import hosts, networks, write_files


@pytest.fixture
def make_tree(tmp_path):
    """Write files and return the SourceTree that holds them: ``make_tree("0.19.1", files)``."""

    def make(version, files, *, kind="sdist", name="tree", project="vllm"):
        root = write_files(tmp_path / name, files)
        return SourceTree(
            root=root, project=project, version=Version(version), kind=kind
        )

    return make


@pytest.fixture(scope="session")
def machine(tmp_path_factory):
    """The facts of a machine of networks.py, or of a node of hosts.py: ``machine("ring", 2)``."""
    folder = tmp_path_factory.mktemp("machines")

    @cache
    def probed(name, node):
        made = (
            hosts.build(folder, name, node=node)
            if node
            else networks.build(folder, name)
        )
        return probe(made, environment={})

    return lambda name, node=0: probed(name, node)


@pytest.fixture
def copied(tmp_path):
    """A machine whose files a test may change."""
    return hosts.build(tmp_path, "cable_port0")
