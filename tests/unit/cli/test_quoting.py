"""Words from outside: what a terminal gets of them, and what a shell makes of commands in hints."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkit.digests import digest
from patchkit.durable.journal import Change, Journal
from patchkit.errors import PatchkitError
from patchkit.quoting import quoted, visible
from support import write_files

ANYTHING = st.text(st.characters())  # surrogates, too
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
EVIL = "sp ace $(touch x) `touch y` 'q' \"\\!\n\x1b[2J\u202e\udcff"


def test_what_is_shown():
    for text, shown in (
        ("vllm/_C.abi3.so → é 中 👍", "vllm/_C.abi3.so → é 中 👍"),
        ("a\n\tb", "a\n\tb"),
        ("\x1b[2J\a\r\x7f\x9b", r"\x1b[2J\x07\r\x7f\x9b"),
        ("\u202ecod.exe\u2066\u200f\u2028", r"\u202ecod.exe\u2066\u200f\u2028"),
        ("\udcff\udc80 \ud800 \U000e0001", r"\xff\x80 \ud800 \U000e0001"),
    ):
        assert visible(text) == shown


@given(ANYTHING)
def test_nothing_that_a_terminal_obeys_is_left(text):
    shown = visible(text)
    assert all(each.isprintable() or each in "\n\t" for each in shown)
    assert visible(shown) == shown
    assert shown.encode().decode() == shown


def words(line):
    """The words that bash makes of a line."""
    code = f'set -- {line}\nprintf "%s\\0" "$@"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, check=True)
    return done.stdout.decode(errors="surrogateescape").split("\0")[:-1]


@settings(max_examples=60, deadline=None)
@given(st.lists(NAMES, min_size=1, max_size=4))
def test_bash_takes_back_every_word_and_a_terminal_obeys_none(given_words):
    line = quoted(*given_words)
    assert words(line) == given_words
    assert line.isprintable()


def test_a_name_that_is_not_utf8_and_a_path_that_looks_like_an_option():
    assert quoted("cat", EVIL).isprintable()
    assert words(quoted("cat", EVIL)) == ["cat", EVIL]
    assert quoted("ls", Path("-rf"), Path("/-x"), "-l") == "ls ./-rf /-x -l"
    assert quoted("pip", "install", "pip>=23") == "pip install 'pip>=23'"


def test_a_file_that_is_read_only_becomes_writable_by_what_is_pasted(tmp_path):
    folder = write_files(tmp_path / EVIL, {"a.py": "old\n"}, mode=0o444)
    place = folder / "a.py"
    journal = Journal(root=folder, folder=folder / ".journal", again="", rescue="")
    with pytest.raises(PatchkitError, match="read-only") as caught:
        journal.commit([Change("a.py", digest(b"old\n"), b"new\n")])
    subprocess.run(["bash", "-c", caught.value.hint], check=True, cwd=folder)
    assert place.stat().st_mode & 0o200
    # The folder's name does something in a shell: nothing of that has happened.
    assert not list(folder.glob("[xy]"))
