"""Runs that are interrupted or killed: the tree is whole after the next one."""

import itertools
import re
import shlex
import signal
import subprocess
import sys
import time
from random import Random

import pytest

from patchkit.apply import apply, revert
from patchkit.patching.fix import Request
from patchkit.patching.recipe import load_recipe
from patchkit.target import targets
from support.faults import in_child, kill

pytestmark = pytest.mark.releases
RELEASE = "0.19.1"
# Edits files of every kind, and creates some.
APPLY = ["apply", "--with", "moe_configs"]
REQUEST = Request(
    target=targets()["gb10"], arch="native", also=frozenset({"moe_configs"})
)


@pytest.fixture
def root(tree):
    return tree(RELEASE)


CODES = {
    signal.SIGKILL: -9,
    signal.SIGINT: 130,
    signal.SIGTERM: 143,
    signal.SIGHUP: 129,
}
SAID = re.compile(
    r"(interrupted; (nothing was changed|the commit was finished, \d+ files|"
    r"an interrupted commit was taken back(; .*)?)\n)?"
)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(n, marks=pytest.mark.e2e) for n in CODES if n != signal.SIGTERM),
    ],
)
def test_interrupted_at_any_moment_it_says_so_and_the_next_run_makes_it_right(
    cli, environment, root, tree, snapshot, number, tmp_path
):
    pristine = snapshot(root)
    whole = tree(RELEASE, name="whole")
    apply(whole, load_recipe("vllm"), REQUEST)
    patched = snapshot(whole)
    random = Random(number)
    # One strikes while it looks and proves, one within the short time of the commit.
    for delay, in_commit in [
        (random.uniform(0.2, 1), False),
        (random.uniform(0, 0.04), True),
    ]:
        command = [sys.executable, "-m", "patchkit", *APPLY, "--vllm-src", root]
        pipe = {"stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, **pipe)
        while (
            in_commit and process.poll() is None and not (root / ".patchkit").exists()
        ):
            time.sleep(0.0005)
        time.sleep(delay)
        process.send_signal(number)
        said = process.communicate()[1]
        # Before patchkit has begun, it dies of the signal like any other program.
        assert process.returncode in (0, CODES[number], -number), said
        assert SAID.fullmatch(said), said
        if "nothing was changed" in said:
            assert snapshot(root) == pristine
        if "was finished" in said:
            assert snapshot(root) == patched

        cli(*APPLY, "--vllm-src", root)
        assert snapshot(root) == patched
        revert(root, "vllm")
        assert snapshot(root) == pristine


def test_killed_in_mid_commit_reading_says_so_and_revert_undoes_it(cli, root, snapshot):
    """The journal of a change that was cut short lies there, with some of the files changed."""
    pristine = snapshot(root)
    cut_short(root)
    before = snapshot(root)
    assert before != pristine

    said = cli("fixes", "--vllm-src", root, rc=7).stderr
    assert "cut short in mid-commit" in said
    assert snapshot(root) == before
    again = said.partition("next: take it back first: ")[2].strip()
    *_program, verb, option, place = shlex.split(again)
    assert verb == "revert"
    cli(verb, option, place)
    assert snapshot(root) == pristine


def cut_short(root):
    """Apply, and be killed soon after the point of no return."""
    since, names = itertools.count(1), ("os.rename", "os.remove", "os.mkdir")

    def hook(event, arguments):
        begun = (root / ".patchkit/transaction/back.json").exists()
        if event in names and begun and next(since) > 1:
            kill()

    assert (
        in_child(lambda: apply(root, load_recipe("vllm"), REQUEST), hook)
        == -signal.SIGKILL
    )
