"""Machines of owners and of documents, probed once."""

import functools

import pytest

from patchkit.runtime.host.probe import probe
from support import hosts, networks


@pytest.fixture(scope="session")
def machine(tmp_path_factory):
    """The facts of a machine: ``machine("bare_half")``, or of a node: ``machine("ring", 2)``."""
    folder = tmp_path_factory.mktemp("machines")

    @functools.cache
    def probed(name, node=None):
        if node is None:
            return probe(networks.build(folder, name), environment={})
        return probe(hosts.build(folder, name, node=node), environment={})

    return probed
