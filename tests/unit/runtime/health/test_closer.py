"""A closer look at this very machine: whatever it is, what cannot be read has a reason."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import fields
from pathlib import Path

from patchkit.records import record
from patchkit.runtime.health.closer import NodeHealth, look_closer
from patchkit.runtime.health.limits import own_limits
from patchkit.runtime.remote.node import Remote


def asked(**given):
    return record(NodeHealth, Remote("localhost").call(look_closer, **given))


def test_this_machine():
    health = asked(venv=sys.prefix, unit="patchkit-nobody.service")

    assert set(health.unread) <= {each.name for each in fields(NodeHealth)}
    assert all(health.unread.values())
    assert "unit" in health.unread
    assert health.page_cache is not None
    assert 0 <= health.page_cache < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 10
    assert all(Path(place).exists() for _, place in health.compilers.programs)


def test_limits_are_those_that_the_kernel_has():
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    assert own_limits("self").files == (None if soft == resource.RLIM_INFINITY else soft)


def test_pins_are_versions_that_vllm_asks_for(tmp_path):
    home = tmp_path / "lib" / "python3.12" / "site-packages" / "vllm-0.25.1.dist-info"
    home.mkdir(parents=True)
    (home / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: vllm\nVersion: 0.25.1\n"
        "Requires-Dist: torch==2.11.0\nRequires-Dist: numba == 0.61.2\n"
        'Requires-Dist: xgrammar==0.1.25; platform_machine == "aarch64"\n'
        'Requires-Dist: ray==2.48.0; extra == "ray"\nRequires-Dist: transformers>=4.56\n\nprose\n'
    )
    health = asked(venv=str(tmp_path))

    assert health.pins == {"torch": "2.11.0", "numba": "0.61.2", "xgrammar": "0.1.25"}
