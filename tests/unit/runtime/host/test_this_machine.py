"""Probe the machine that runs the tests."""

from __future__ import annotations

import json

import pytest

from patchkit.errors import HostError
from patchkit.runtime.host.links import address_lines
from patchkit.runtime.host.probe import probe


def test_the_kernel_is_asked_for_addresses():
    told = {each["ifname"]: each["addr_info"] for each in json.loads(address_lines())}
    local = [(each["local"], each["prefixlen"]) for each in told["lo"]]
    assert ("127.0.0.1", 8) in local
    live = probe(environment={})
    found = [(each.address, each.prefix) for each in live.netdev("lo").addresses]
    assert found == local
    assert {name: len(own) for name, own in told.items()} == {
        each.name: len(each.addresses) for each in live.netdevs
    }


def test_a_python_that_does_not_start(tmp_path):
    """A note where it was found by chance, an error where it was asked for."""
    broken = tmp_path / "python3"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    found = probe(environment={"PATH": str(tmp_path)})
    assert found.software is None
    assert found.notes[-1].startswith(f"no Python tells what is installed: {broken}: exit code 3")
    with pytest.raises(HostError, match="exit code 3"):
        probe(python=str(broken), environment={})
