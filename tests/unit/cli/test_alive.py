"""Print nothing for a while: a terminal sees that a verb is at work, a pipe does not."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from patchkit.cli.verbs import TALKING, VERBS

# Waits until something was drawn, or for twice as long as it takes.
SILENT = """
import contextlib, time
from patchkit.cli import alive, out
alive.watch_silence()
with {manner}():
    for _ in range(20):
        if alive._terminal.drawn:
            break
        time.sleep(0.05)
out.say("an answer")
"""


def output_of(script, *, terminal):
    """What a script prints, in a terminal or to pipes."""
    command = [sys.executable, "-c", script]
    if not terminal:
        return subprocess.run(command, capture_output=True, check=True).stdout.decode()
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        parts = []
        try:
            while part := os.read(ours, 1 << 16):
                parts.append(part)
        except OSError:  # Linux ends a terminal that nobody has open so
            pass
        process.wait()
    os.close(ours)
    return b"".join(parts).decode()


@pytest.mark.parametrize(
    ("manner", "terminal", "expected"),
    [
        ("contextlib.nullcontext", True, "\r\x1b[Kat work, 1 s\r\x1b[Kan answer\r\n"),
        ("alive.unwatched", True, "an answer\r\n"),
        ("contextlib.nullcontext", False, "an answer\n"),
    ],
)
def test_silence_is_shown_in_a_terminal_and_goes_away(manner, terminal, expected):
    assert output_of(SILENT.format(manner=manner), terminal=terminal) == expected


def test_a_verb_that_talks_is_one():
    assert set(VERBS) >= TALKING
