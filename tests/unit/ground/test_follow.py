"""Programs that answer by lines, until they go over a limit."""

import os
import sys

import pytest

from patchkit.errors import StorageError
from patchkit.follow import Follow, FollowLimits

PYTHON = sys.executable


def talk(script, **limits):
    """Return the lines of a shell script, and how it ended."""
    with Follow("sh", "-c", script, given=(), limits=FollowLimits(**limits)) as running:
        return list(running), running.done


def test_limits():
    for script, limits, lines, trouble in (
        ("echo a; echo b >&2; printf c", {}, ["a\n", "c"], ""),
        ("echo a; echo b >&2; exit 3", {}, ["a\n"], "exit code 3: b"),
        ("echo a; sleep 60", {"silence": 0.3}, ["a\n"], "no sign of life for 0.3 s"),
        # What has no mark is no sign of life, nor are errors.
        (
            "while echo; do :; done",
            {"mark": "m", "size": 1 << 16},
            [],
            "more than 0.0625 MiB",
        ),
        (
            "while sleep 0.05; do echo; done",
            {"silence": 0.3, "mark": "m"},
            [],
            "no sign of life",
        ),
        (
            "while echo >&2; do :; done",
            {"silence": 0.3},
            [],
            "no sign of life for 0.3 s",
        ),
        ("printf 'title m: 1\\nx\\n'", {"mark": "m: "}, ["1\n"], ""),
        (
            "while sleep 0.05; do echo; done",
            {"seconds": 0.3},
            ...,
            "no answer within 0.3 s",
        ),
        (
            "while printf xxxxxxxx; do :; done",
            {"line": 1 << 16},
            [],
            "a line of more than 0.0625",
        ),
    ):
        found, done = talk(script, **limits)
        assert lines is ... or found == lines
        assert trouble in done.trouble
        assert bool(done.trouble) == bool(trouble)


def test_a_program_that_reads_or_writes_nothing_more():
    """One is given up; the other may go on until its time is over."""
    given, limits = [b"x" * (1 << 20)], FollowLimits(silence=0.2)
    with Follow("sleep", "60", given=given, limits=limits) as running:
        assert list(running) == []
    assert running.done.trouble == "no sign of life for 0.2 s"
    found, done = talk("exec >&-; sleep 0.2; echo b >&2; exit 3", seconds=60)
    assert (found, done.trouble) == ([], "exit code 3: b")
    found, done = talk("exec >&-; exec sleep 60", seconds=0.2)
    assert (found, done.trouble) == ([], "no answer within 0.2 s")


def test_who_listens_shows_it():
    """Line feeds come as long as the dialogue is open, read or not, and then an end."""
    script = "read a; read b; echo 2; cat > /dev/null; echo ended"
    with Follow("sh", "-c", script, given=(), beat=0.05) as running:
        assert next(iter(running)) == "2\n"


@pytest.mark.parametrize("kind", [StorageError, OSError])
def test_what_a_program_is_given_flows_through_it_and_its_error_is_raised(kind):
    """An OSError of what is given is not one of the program, which ends the dialogue alone."""

    def given():
        yield from [b"x" * 1023 + b"\n"] * 4096
        raise kind("the disk failed")

    lines = []
    with (
        pytest.raises(kind, match="disk failed"),
        Follow("cat", given=given()) as running,
    ):
        lines.extend(running)
    assert len(lines) == 4096


def test_lines_come_while_the_program_runs():
    code = "import sys; print('a', end='\\r', flush=True); print('b', file=sys.stderr); sys.exit(4)"
    with Follow(PYTHON, "-c", code, env=dict(os.environ)) as running:
        assert [line for line in running if line] == ["a\n", "b\n"]
    done = running.done
    assert (done.status, done.trouble, done.output) == (
        4,
        "exit code 4: a\nb",
        "a\nb\n",
    )
    with Follow("nosuch-program", env={}) as running:
        assert list(running) == []
    assert running.done.started is False


def test_a_program_ends_when_nobody_reads_it_any_more():
    with Follow("sh", "-c", "echo $$; exec sleep 600") as running:
        pid = int(next(line for line in running if line))
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_long_outputs_and_lines_do_not_fill_the_memory():
    with Follow("seq", "0", "999") as running:
        assert len([line for line in running if line]) == 1000
    assert running.done.output.splitlines() == [str(n) for n in range(600, 1000)]
    with Follow(
        PYTHON, "-c", "print('x' * (5 << 20))", env=dict(os.environ)
    ) as running:
        assert max(map(len, running)) < 2 << 20
