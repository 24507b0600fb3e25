"""Read what is signed of a wheelhouse as it was written, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from patchkit.errors import HashMismatchError
from patchkit.wheel.wheelhouse.statement import Statement, read_statement

SUMS, MANIFEST, LOCK = "SHA256SUMS", "manifest.json", "requirements.txt"
DIGEST = st.binary(min_size=32, max_size=32).map(bytes.hex)  # of a pattern it takes 0.2 s each
STATEMENTS = st.builds(
    Statement,
    wheelhouse=st.binary(min_size=8, max_size=8).map(bytes.hex),
    counter=st.integers(1, 999_999_999),
    date=st.just("2026-11-22T04:30:00Z"),
    sums=st.fixed_dictionaries({SUMS: DIGEST, MANIFEST: DIGEST, LOCK: DIGEST}),
)


@given(STATEMENTS)
def test_a_statement_is_read_as_it_was_written(statement):
    assert read_statement(statement.text.encode()) == statement


@given(STATEMENTS, st.data())
def test_any_other_text_is_no_statement(statement, data):
    text = statement.text.encode()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(start + 8, len(text))))
    changed = text[:start] + data.draw(st.binary(max_size=8)) + text[end:]
    try:
        found = read_statement(changed)
    except HashMismatchError:
        return
    assert found.text.encode() == changed
