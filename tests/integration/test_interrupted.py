"""Several runs at once, and runs that are killed: the tree is whole after the next one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from random import Random

import pytest

pytestmark = pytest.mark.releases
RELEASE = "0.19.1"
# Edits files of every kind, and creates some.
APPLY = ["apply", "--with", "moe_configs"]


@pytest.fixture
def root(tree):
    return tree(RELEASE)


@pytest.fixture
def started(environment, tmp_path):
    """Start an apply that nobody waits for yet: ``started("--vllm-src", root)``."""

    def start(*source):
        return subprocess.Popen(
            [sys.executable, "-m", "patchkit", *APPLY, *map(str, source)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def finished(processes):
    """Their exit codes, sorted; what they said on standard error is never an accident."""
    said = [process.communicate()[1] for process in processes]
    assert not [text for text in said if "Traceback" in text or "internal error" in text]
    return sorted(process.returncode for process in processes)


def test_two_applies_at_once(cli, started, root, tree, snapshot):
    alone = tree(RELEASE, name="alone")
    cli(*APPLY, "--vllm-src", alone)

    both = [started("--vllm-src", root), started("--vllm-src", root)]

    assert finished(both) in ([0, 0], [0, 6])
    assert snapshot(root) == snapshot(alone)


def test_two_applies_of_a_release_into_one_folder(cli, started, sdist, tmp_path):
    sdist(RELEASE)
    source = ["--vllm-src", f"vllm=={RELEASE}", "--dest", tmp_path / "tree", "--offline"]

    both = [started(*source), started(*source)]

    # The slower one finds the folder taken, busy or patched; the disk has no part in that.
    assert finished(both) in ([0, 0], [0, 3], [0, 6])
    assert json.loads(cli(*APPLY, *source, "--json").stdout)["written"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_moment_the_next_run_makes_it_right(cli, started, root, tree, snapshot, seed):
    pristine = snapshot(root)
    whole = tree(RELEASE, name="whole")
    cli(*APPLY, "--vllm-src", whole)
    random = Random(seed)
    # Half of the kills come while it looks and proves, half within the short time of the commit.
    for delay, in_commit in [(random.uniform(0, 1), False), (random.uniform(0, 0.04), True)]:
        process = started("--vllm-src", root)
        while in_commit and process.poll() is None and not (root / ".patchkit").exists():
            time.sleep(0.0005)
        time.sleep(delay)
        process.kill()
        process.communicate()

        cli(*APPLY, "--vllm-src", root)
        assert snapshot(root) == snapshot(whole)
        cli("revert", "--vllm-src", root)
        assert snapshot(root) == pristine


@pytest.mark.parametrize("seed", range(2))
def test_killed_in_mid_commit_reading_says_so_and_revert_undoes_it(
    cli, started, root, snapshot, seed
):
    pristine = snapshot(root)
    random = Random(seed)
    for _attempt in range(40):
        process = started("--vllm-src", root)
        journal = root / ".patchkit/transaction/journal.json"
        while process.poll() is None and not journal.exists():
            pass
        time.sleep(random.uniform(0, 0.005))
        process.kill()
        process.communicate()
        if journal.exists():
            break
        cli("revert", "--vllm-src", root)
    before = snapshot(root)

    assert "cut short in mid-commit" in cli("status", "--vllm-src", root, rc=7).stderr
    assert snapshot(root) == before
    cli("revert", "--vllm-src", root)
    assert snapshot(root) == pristine
