"""Run proofs side by side, with signals to them: nothing is left behind or mistaken."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from patchkit.durable import signals
from patchkit.errors import ProofError, StorageError
from patchkit.proof import child_process, parallel
from patchkit.proof.child_process import forked
from patchkit.proof.parallel import side_by_side
from patchkit.proof.sandbox import missing
from support.faults import at_each_line

pytestmark = pytest.mark.skipif(missing() != "", reason=f"no sandbox here: {missing()}")


def test_calls_side_by_side_keep_their_order_and_their_errors():
    parent = os.getpid()
    assert side_by_side([]) == []
    here, *aside = side_by_side([os.getpid] * 3)
    assert here == parent
    assert len({here, *aside}) == 3

    def fails(words):
        raise ProofError(words, why="w", hint="h")

    with pytest.raises(ProofError, match="second") as caught:
        side_by_side([os.getpid, partial(fails, "second"), partial(fails, "third")])
    assert (caught.value.why, caught.value.hint) == ("w", "h")
    with pytest.raises(StorageError, match="ended early: killed by SIGKILL"):
        side_by_side([os.getpid, lambda: os.kill(os.getpid(), signal.SIGKILL)])


COMMAND = """
import sys, time
from pathlib import Path
from patchkit import __main__, cli
from patchkit.durable.staging import ScratchFolder
from patchkit.proof.child_process import forked
from patchkit.proof.parallel import side_by_side

end = Path(sys.argv[1])

def wait():
    while not end.exists():
        time.sleep(0.01)

def work():
    with ScratchFolder() as folder:
        for number in range(300):
            Path(folder, str(number)).touch()
        Path(folder, "begun").touch()
        return forked(wait, None).trouble

cli.main = lambda: print(side_by_side([work] * 4))
__main__.main()
"""


@pytest.fixture
def command(tmp_path):
    """Start a command in a group of its own, and wait until it works in four processes."""

    def start(before="", end=tmp_path / "end"):
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": scratch}
        started = subprocess.Popen(
            ["/bin/sh", "-c", f'{before} exec "$@"', "sh", sys.executable, "-c", COMMAND, end],
            env=environment,
            start_new_session=True,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        while len([*scratch.glob("*/begun")]) < 4 and started.poll() is None:
            time.sleep(0.01)
        return started, scratch

    return start


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_a_storm_of_signals_to_the_whole_group_leaves_nothing(number, command):
    started, scratch = command()
    for _ in range(30):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, number)
        time.sleep(0.001)
    assert started.communicate() == ("", "interrupted; nothing was changed\n")
    assert started.returncode == 128 + number
    assert not [*scratch.iterdir()]


@pytest.mark.e2e
def test_interrupted_at_any_line_it_is_an_interrupt():
    """Send no signal to a child that is gone, and wait for none."""
    files = {module.__file__ for module in (parallel, child_process)}

    def work():
        try:
            side_by_side([lambda: forked(os.getpid, None).trouble, os.getpid])
        except signals.Interrupted as interrupt:
            os._exit(interrupt.exit_code)

    def strike(_frame):
        os.kill(os.getpid(), signal.SIGHUP)

    codes = at_each_line(work, files.__contains__, strike, signals.raise_interrupts)
    assert len(codes) > 30
    assert set(codes) == {129}
