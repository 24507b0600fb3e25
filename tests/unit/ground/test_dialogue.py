"""Programs that answer by lines, until they go over a limit."""

import contextlib
import time

import pytest

from patchkit.dialogue import DialogueLimits, dialogue


def talk(script, **limits):
    """Return the lines of a shell script, and how it ended."""
    lines, running = [], dialogue("sh", "-c", script, given=b"", limits=DialogueLimits(**limits))
    while True:
        try:
            lines.append(next(running))
        except StopIteration as end:
            return lines, end.value


def test_limits():
    for script, limits, lines, trouble in (
        ("echo a; echo b >&2; printf c", {}, ["a\n", "c"], ""),
        ("echo a; echo b >&2; exit 3", {}, ["a\n"], "exit code 3: b"),
        ("echo a; sleep 60", {"silence": 0.3}, ["a\n"], "no sign of life for 0.3 s"),
        # What has no mark is no sign of life, nor are errors.
        ("while echo; do :; done", {"mark": "m", "size": 1 << 16}, [], "more than 0.0625 MiB"),
        ("while sleep 0.05; do echo; done", {"silence": 0.3, "mark": "m"}, [], "no sign of life"),
        ("while echo >&2; do :; done", {"silence": 0.3}, [], "no sign of life for 0.3 s"),
        ("printf 'title m: 1\\nx\\n'", {"mark": "m: "}, ["1\n"], ""),
        ("while sleep 0.05; do echo; done", {"seconds": 0.3}, ..., "not done after 0.3 s"),
        ("while printf xxxxxxxx; do :; done", {"line": 1 << 16}, [], "a line of more than 0.0625"),
    ):
        found, done = talk(script, **limits)
        assert lines is ... or found == lines
        assert trouble in done.trouble
        assert bool(done.trouble) == bool(trouble)


def test_a_program_that_reads_nothing_is_given_up():
    running = dialogue("sleep", "60", given=b"x" * (1 << 20), limits=DialogueLimits(silence=0.2))
    began = time.monotonic()
    with pytest.raises(StopIteration) as end:
        next(running)
    assert end.value.value.trouble == "no sign of life for 0.2 s"
    assert time.monotonic() - began < 10


def test_who_listens_shows_it():
    """Line feeds come as long as the dialogue is open, read or not, and then an end."""
    script = "read a; read b; echo 2; cat > /dev/null; echo ended"
    with contextlib.closing(
        dialogue("sh", "-c", script, given=b"", limits=DialogueLimits(beat=0.05))
    ) as running:
        assert next(running) == "2\n"
