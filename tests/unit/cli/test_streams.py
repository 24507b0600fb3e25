"""Close, fill and leave the standard streams: the exit codes are those of the docs."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from patchkit.cli import translate_error


@pytest.mark.parametrize("words", [["fixes"], ["--version"], ["env", "--help"]])
def test_a_reader_that_leaves_is_no_bug(words):
    """As `patchkit fixes | head -1`: the code of a program that SIGPIPE ends."""
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        [sys.executable, "-m", "patchkit", *words],
        stdout=theirs,
        stderr=subprocess.PIPE,
    )
    os.close(theirs)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_streams_that_are_closed_or_full_are_no_bug():
    for words, streams, code, said in (
        ("fixes --json", ">/dev/full", 7, b"standard output: No space left on device"),
        ("fixes", ">&-", 7, b"standard output: Bad file descriptor"),
        ("--version", "<&- >&- 2>&-", 7, b""),
        ("fixes", "<&- 2>&-", 0, b""),
        ("nosuchverb", "2>&-", 2, b""),
        ("nosuchverb", "2>/dev/full", 2, b""),
        ("doctor --log -", "<&-", 3, b"standard input: is empty"),
    ):
        command = [sys.executable, "-m", "patchkit", *words.split()]
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {streams}', "sh", *command], capture_output=True
        )
        assert done.returncode == code
        assert said in done.stderr
        assert b"internal error" not in done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "x"), 7),
        (MemoryError(), 7),
        (RecursionError(), 3),
        (ValueError(), None),
    ],
)
def test_what_the_system_refuses_is_no_bug(error, code):
    told = translate_error(error)
    assert (told and told.exit_code) == code


def test_an_error_of_no_file_is_told_without_one():
    told = translate_error(OSError(errno.EAGAIN, "Resource temporarily unavailable"))
    assert told
    assert told.what == "Resource temporarily unavailable"
