"""`patchkit repack` called on small wheels: where it works, what it knows, what it is given."""

from __future__ import annotations

import pytest

from patchkit.patching.fix import Request
from patchkit.patching.recipe import load_recipe
from patchkit.source.releases import LockEntry
from patchkit.target import targets
from patchkit.wheel.build import work
from patchkit.wheel.vllm import repack_origin as upstream
from patchkit.wheel.vllm.repack import repack_wheel
from patchkit.wheel.vllm.repack_origin import find_wheel
from support.vllm_wheels import FIX, VERSION, sha256


def quiet(_task):
    return lambda _done, _total: None


def found(spec, *, cpu="aarch64", digest=None):
    check = load_recipe("vllm").check
    return find_wheel(str(spec), cpu, sha256=digest, offline=True, report=quiet, check=check)


def repacked(spec, request, house, **which):
    with found(spec, **which) as origin:
        return repack_wheel(origin, request, house, report=quiet)


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.setattr(work, "WORK", tmp_path / "work")


@pytest.fixture
def house(tmp_path):
    return tmp_path / "wheelhouse"


@pytest.fixture
def run(house):
    """Repack a file that is vouched for, with one fix: ``run(wheel, target="thor")``."""

    def make(wheel, *, target="gb10", only=(FIX,), cpu="aarch64", **selection):
        chosen = {name: frozenset(ids) for name, ids in selection.items()}
        request = Request(target=targets()[target], only=frozenset(only), **chosen)
        return repacked(wheel, request, house, cpu=cpu, digest=sha256(wheel))

    return make


@pytest.fixture
def known(monkeypatch):
    """Make a file known to the lock, as if it were upstream's."""

    def lock(wheel, cpu="aarch64"):
        entry = LockEntry(VERSION, wheel.name, sha256(wheel), wheel.stat().st_size)
        monkeypatch.setattr(upstream, "upstream_wheels", lambda: {cpu: {VERSION: entry}})
        return wheel

    return lock
