"""Ctrl-C, `kill` and a closed terminal: held back while files change, and the truth is told."""

import contextlib
import fcntl
import itertools
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import time
from functools import partial

import pytest

from patchkit import __main__ as command_line
from patchkit.digests import digest
from patchkit.durable import signals
from patchkit.durable.journal import Change, Journal
from patchkit.errors import StorageError
from support import read_files, write_files
from support.faults import in_child

CHANGES = [Change("a.py", digest(b"old\n"), b"new\n"), Change("b.py", "", b"created\n")]
OLD, NEW = {"a.py": b"old\n"}, {"a.py": b"new\n", "b.py": b"created\n"}


@pytest.fixture
def root(tmp_path):
    (tmp_path / "a.py").write_bytes(OLD["a.py"])
    return tmp_path


@pytest.fixture
def journal(root):
    return Journal(root=root, folder=root / ".journal", again="again", rescue="sos")


def interrupted(action, said):
    """Run in a process of its own, which ends as the command line does if it says the truth."""

    def run():
        signals.raise_interrupts()
        with pytest.raises(signals.Interrupted) as caught:
            action()
        os._exit(
            caught.value.exit_code
            if str(caught.value) == f"interrupted; {said}"
            else 99
        )

    return in_child(run)


def signalled(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_an_interrupt_waits_for_the_change_or_comes_before_it(number, root, journal):
    def change():
        with signals.deferred():
            signalled(number)
            journal.commit(CHANGES)

    class Staged(list):
        def __iter__(self):  # which can take long
            signalled(number)
            return super().__iter__()

    assert (
        interrupted(lambda: journal.commit(Staged(CHANGES)), "nothing was changed")
        > 128
    )
    assert read_files(root) == OLD
    assert interrupted(change, "the commit was finished, 2 files") == 128 + number
    assert read_files(root) == NEW


def test_what_was_changed_in_a_folder_that_is_gone_is_not_told(root, journal):
    def change():
        journal.commit(CHANGES)
        shutil.rmtree(root)
        signalled(signal.SIGINT)

    assert interrupted(change, "nothing was changed") == 130


def test_a_signal_that_is_ignored_stays_ignored():
    def hung_up():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        signals.raise_interrupts()
        signalled(signal.SIGHUP)

    assert in_child(hung_up) == 0


def test_an_interrupt_in_a_finaliser_comes_right_after_it(capfd):
    """Python lets no error out of it."""

    class Finalised:
        def __del__(self):
            signalled(signal.SIGINT)
            "".join(["here", "it", "strikes"])

    def action():
        Finalised()
        time.sleep(10)

    assert interrupted(action, "nothing was changed") == 130
    assert capfd.readouterr().err == ""


def test_an_interrupt_that_python_wraps_is_unwrapped():
    def action():
        with signals.unwrapped():
            try:
                signalled(signal.SIGINT)
            except signals.Interrupted as error:
                raise ValueError("a module cannot be loaded") from error

    assert interrupted(action, "nothing was changed") == 130


@pytest.mark.parametrize(
    "error", [StorageError("a.py was not put back"), OSError(28, "full")]
)
def test_what_fails_after_an_interrupt_is_said(error):
    @signals.unwrapped()
    def put_away():
        try:
            raise signals.Interrupted(signal.SIGINT)
        finally:
            raise error

    with pytest.raises(type(error)):
        put_away()


def test_a_second_one_does_not_disturb_what_the_first_one_ends():
    """An answer that ends while the next is asked for: each is an interrupt of its own."""

    def ended():
        signals.raise_interrupts()
        put_away = 0
        for _ in range(3):
            with contextlib.suppress(signals.Interrupted):
                try:
                    signalled(signal.SIGINT)
                finally:
                    for number in signals.SIGNALS:
                        signalled(number)
                    put_away += 1
        os._exit(put_away)

    assert in_child(ended) == 3


@pytest.mark.e2e
def test_from_the_first_line_to_the_last_an_interrupt_is_one_line_or_none(
    capfd, monkeypatch
):
    """End as any other program does before the handlers stand, and after the last word."""
    monkeypatch.setattr(sys, "argv", ["patchkit", "--version"])
    files = {module.__file__ for module in (command_line, signals)}

    def struck_at(line):
        process, lines = os.getpid(), itertools.count()

        def trace(frame, event, _argument):
            if os.getpid() != process or frame.f_code.co_filename not in files:
                return None
            if event == "line" and next(lines) == line:
                signalled(signal.SIGHUP)
            return trace

        sys.settrace(trace)
        try:
            command_line.main()
        except SystemExit as end:
            os._exit(end.code or 0)

    ends = (in_child(partial(struck_at, line)) for line in itertools.count())
    codes = [*itertools.takewhile(bool, ends)]
    assert len(codes) > 20
    assert set(codes) == {129, -signal.SIGHUP}
    assert set(capfd.readouterr().err.splitlines()) == {
        "interrupted; nothing was changed"
    }


def test_a_terminal_that_is_closed_is_sighup_and_no_error_of_its_own(tmp_path):
    write_files(tmp_path, {"ssh": "#!/bin/sh\n: > begun\nexec sleep 20\n"}, mode=0o755)
    (tmp_path / "cluster.toml").write_text(
        '[[node]]\nssh = "one"\n[[node]]\nssh = "two"\n'
    )
    terminal, own = pty.openpty()
    started = subprocess.Popen(
        [sys.executable, "-m", "patchkit", "up", "a/b"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdin=own,
        stdout=own,
        stderr=own,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(own)
    while not (tmp_path / "begun").exists() and started.poll() is None:
        time.sleep(0.02)
    os.close(terminal)
    assert started.wait(30) == 129
