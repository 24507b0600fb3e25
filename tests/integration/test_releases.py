"""Every release, both arch modes: apply, ask again, change one's mind, go back."""

from __future__ import annotations

import gc
import json
import shutil
import tarfile
import time

import pytest

from patchkit.apply import apply, revert
from patchkit.errors import SourceError

pytestmark = pytest.mark.releases
OTHER = {"native": "family", "family": "native"}


@pytest.fixture
def expected(golden, version, arch):
    return golden.read_states()[version][arch]


def states(outcome):
    return {verdict.fix.id: verdict.state.value for verdict in outcome.verdicts}


def test_apply_is_idempotent_and_revert_gives_back_every_byte(
    version, arch, expected, tree, snapshot, recipe, ask, cli
):
    root = tree(version)
    pristine = snapshot(root)

    first = apply(root, recipe, ask(arch))
    patched = snapshot(root)
    again = apply(root, recipe, ask(arch))
    shown = json.loads(cli("status", "--vllm-src", root, "--json").stdout)

    assert states(first) == expected
    assert (states(again), again.written) == (expected, ())
    assert {fix["id"]: fix["state"] for fix in shown["fixes"]} == expected
    assert (shown["version"], shown["arch"]) == (version, arch)
    assert snapshot(root) == patched
    assert set(first.written) == {
        path for path, known in patched.items() if pristine.get(path, known) != known
    }
    assert revert(root) == tuple(sorted(first.written))
    assert snapshot(root) == pristine


def test_changing_the_mode_and_back_equals_a_fresh_apply(
    version, arch, tree, snapshot, recipe, ask
):
    root = tree(version)
    apply(root, recipe, ask(arch))
    fresh = snapshot(root)

    apply(root, recipe, ask(OTHER[arch]))
    other = snapshot(root)
    apply(root, recipe, ask(arch))

    assert other != fresh
    assert snapshot(root) == fresh


def test_a_patched_tree_without_its_ledger_is_recognised(
    version, arch, expected, tree, snapshot, recipe, ask
):
    root = tree(version)
    apply(root, recipe, ask(arch))
    shutil.rmtree(root / ".patchkit")
    patched = snapshot(root)

    again = apply(root, recipe, ask(arch))

    assert (states(again), again.written) == (expected, ())
    assert snapshot(root) == patched
    with pytest.raises(SourceError, match="has changed nothing here"):
        revert(root)


@pytest.fixture
def interrupted_often():
    """Let a garbage collection hand over to another thread, as any finaliser in Python may do."""
    before = gc.get_threshold()

    def hand_over(_phase, _info):
        time.sleep(0.0005)

    gc.callbacks.append(hand_over)
    gc.set_threshold(100)
    yield
    gc.set_threshold(*before)
    gc.callbacks.remove(hand_over)


@pytest.mark.usefixtures("interrupted_often")
@pytest.mark.parametrize("version", ["0.18.1"])
def test_proofs_that_run_side_by_side_do_not_disturb_each_other(version, release, golden):
    # On Python 3.11, ast.parse fails if two threads are in it (gh-106905).
    for _attempt in range(8):
        assert golden.plan(release(version), "native").texts


@pytest.mark.parametrize("version", ["0.19.1"])
def test_the_release_behind_a_private_tree_stays_as_it_was_shipped(
    version, sdist, release, tree, recipe, ask
):
    root = tree(version)
    apply(root, recipe, ask("native"))
    apply(root, recipe, ask("family"))
    revert(root)

    with tarfile.open(sdist(version)) as archive:
        shipped = {
            member.name.partition("/")[2]: archive.extractfile(member).read()
            for member in archive
            if member.isfile()
        }
    files = {p.relative_to(release(version)): p for p in release(version).rglob("*")}
    assert {str(n): p.read_bytes() for n, p in files.items() if p.is_file()} == shipped
