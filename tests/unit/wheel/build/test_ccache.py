"""What ccache counted during a build, in a sentence."""

from __future__ import annotations

import os
import subprocess

import pytest

from patchkit.wheel.build.ccache import counted, savings
from support.needed import need

BEFORE = {"direct_cache_hit": 7, "preprocessed_cache_hit": 1, "cache_miss": 100, "x": 5}


@pytest.mark.parametrize(
    ("grown", "says"),
    [
        ((70, 10, 25), "ccache: 80 of 105 compilations were hits"),
        ((0, 0, 3), "ccache: 0 of 3 compilations were hits"),
        ((0, 0, 0), "ccache: nothing was compiled anew"),
    ],
)
def test_only_what_came_in_between_counts(grown, says):
    names = ("direct_cache_hit", "preprocessed_cache_hit", "cache_miss")
    after = {name: BEFORE[name] + more for name, more in zip(names, grown, strict=True)}
    assert savings(BEFORE, after) == says


def test_without_a_ccache(tmp_path):
    assert counted({"PATH": str(tmp_path)}) is None
    assert counted({"PATH": os.environ["PATH"], "CCACHE_DISABLE": "1"}) is None
    assert savings(None, None) == "no ccache: a second build compiles everything again"


def test_a_real_one(tmp_path):
    need("ccache", "g++")
    environment = {"PATH": os.environ["PATH"], "CCACHE_DIR": str(tmp_path / "cache")}
    (tmp_path / "a.cc").write_text("int a;")
    before, says = counted(environment), []
    for _ in range(2):
        command = ["ccache", "g++", "-c", "a.cc"]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True)
        says.append(savings(before, counted(environment)))
    assert says == [f"ccache: {n} compilations were hits" for n in ("0 of 1", "1 of 2")]
