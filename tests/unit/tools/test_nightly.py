"""Run what runs by night: how each part ended, and nothing passes that did not run."""

import re

import pytest

from tools.nightly import run_parts

SESSIONS = """\
import sys

import nox

@nox.session(python=False)
def good(session):
    session.run(sys.executable, "-c", "print('fine')")

@nox.session(python=False)
@nox.parametrize("number", [1, 2])
def twice(session, number):
    pass

@nox.session(python=False)
def endless(session):
    session.run(sys.executable, "-c", "import time; time.sleep(1000)")

@nox.session(python=False)
def without_a_program(session):
    session.skip("mmdebstrap is not installed")

@nox.session(python=False)
def bad(session):
    said = "print('error: a | b', '  next: c', sep=chr(10))"
    session.run(sys.executable, "-c", said + "; raise SystemExit(3)")
"""


@pytest.fixture
def run(tmp_path, capsys):
    """Run sessions of a noxfile as parts: ``run("good")`` gives the exit code and the rows."""
    noxfile = tmp_path / "noxfile.py"
    noxfile.write_text(SESSIONS)

    def rows(*parts, limit="10m"):
        code = run_parts(parts, noxfile, limit)
        table = capsys.readouterr().out.rpartition("| --- | --- | --- | --- |\n")[2]
        return code, [re.sub(r"\| \d+ \|", "| S |", row) for row in table.splitlines()]

    return rows


def test_one_that_fails_stops_no_other_and_none_passes_that_did_not_run(run):
    assert run("bad", "nosuch", "twice", "without_a_program", "good") == (
        1,
        [
            r"| bad | FAILED | S | error: a \| b |",
            "| nosuch | FAILED | S | nox ended without a report |",
            "| twice | FAILED | S | nox ran 2 sessions instead of one |",
            "| without_a_program | NOT RUN | S | mmdebstrap is not installed |",
            "| good | passed | S |  |",
        ],
    )


def test_what_did_not_run_is_no_failure(run):
    code, rows = run("without_a_program")
    assert (code, len(rows)) == (0, 1)


def test_one_that_does_not_end_is_ended(run):
    assert run("endless", limit="2s") == (
        1,
        ["| endless | FAILED | S | took more than 2s |"],
    )
