"""Ctrl-C, `kill` and a closed terminal: held back while files change, and the truth is told."""

from __future__ import annotations

import os
import signal

import pytest

from patchkit.digests import digest
from patchkit.durable import signals
from patchkit.durable.journal import Change, Journal
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


def contents(root):
    return {place.name: place.read_bytes() for place in root.iterdir()}


def interrupted(action, said):
    """Run in a process of its own, which ends as the command line does if it says the truth."""

    def run():
        signals.raise_interrupts()
        with pytest.raises(signals.Interrupted) as caught:
            action()
        os._exit(caught.value.exit_code if str(caught.value) == f"interrupted; {said}" else 99)

    return in_child(run)


def signalled(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_an_interrupt_waits_until_the_change_is_finished(number, root, journal):
    def change():
        with signals.deferred():
            signalled(number)
            journal.commit(CHANGES)

    assert interrupted(change, "the commit was finished, 2 files") == 128 + number
    assert contents(root) == NEW


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_an_interrupt_while_it_is_settled_takes_the_change_back(number, root, journal):
    def change():
        journal.commit(CHANGES, settle=lambda: signalled(number))

    assert interrupted(change, "nothing was changed") == 128 + number
    assert contents(root) == OLD


def test_a_signal_that_is_ignored_stays_ignored():
    def hung_up():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        signals.raise_interrupts()
        signalled(signal.SIGHUP)

    assert in_child(hung_up) == 0
