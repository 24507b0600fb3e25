import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkit.edit.splice import Edit, splice, together, unified_diff
from patchkit.edit.text import absent
from patchkit.errors import AbsentError, DriftError, MissingError

TEXT = "one\ntwo é\nthree\n"


def edit(start, stop, replacement, note="note"):
    return Edit("src/a.txt", start, stop, replacement, note)


def test_splice():
    for edits, expected in (
        ([], TEXT),
        ([edit(4, 7, "TWO")], "one\nTWO é\nthree\n"),
        ([edit(10, 15, "3"), edit(0, 3, "1")], "1\ntwo é\n3\n"),
        (
            [edit(0, 0, "zero\n"), edit(16, 16, "four\n")],
            "zero\none\ntwo é\nthree\nfour\n",
        ),
        ([edit(0, 0, "> "), edit(0, 3, "1")], "> 1\ntwo é\nthree\n"),
        ([edit(8, 9, "𝟚\f\u2028")], "one\ntwo 𝟚\f\u2028\nthree\n"),
    ):
        assert splice(TEXT, edits) == expected


@pytest.mark.parametrize(
    ("edits", "where"),
    [
        (
            [edit(0, 5, "x"), edit(4, 7, "y", "the later")],
            r"src/a.txt:2: .*\(the later\)",
        ),
        ([edit(10, 12, "x"), edit(0, 16, "y"), edit(11, 11, "z")], r"src/a.txt:3: "),
        ([edit(15, 17, "past the end")], r"src/a.txt:3: "),
    ],
)
def test_splice_refuses_overlapping_edits(edits, where):
    with pytest.raises(DriftError, match=where):
        splice(TEXT, edits)


def texts():
    # Few different lines, so that hunks repeat and move; everything but LF may be inside one.
    character = st.sampled_from("ab -+@\\\t\f\v\x1c\x85\u2028é𝟚")
    line = st.text(character, max_size=3)
    return st.lists(line, max_size=12).map("\n".join)


@settings(max_examples=150, deadline=None, database=None)
@given(before=texts(), after=texts())
def test_a_diff_leads_from_one_text_to_the_other(before, after, git, tmp_path_factory):
    folder = tmp_path_factory.mktemp("git")
    place = folder / "a.txt"
    place.write_text(before, encoding="utf-8", newline="")

    if diff := unified_diff("a.txt", before, after):
        git(folder, "apply", stdin=diff)

    assert place.read_bytes().decode() == after


def test_places_that_belong_together_are_all_there_or_none_is():
    def missing():
        raise absent("a.txt: no b")

    here = edit(0, 3, "1")
    assert together(lambda: [here], list) == [here]
    with pytest.raises(AbsentError, match=r"a\.txt: no b\n"):
        together(missing, missing)
    # Edits are left to make: the missing code may come later. None are: half is patched.
    for places, kind in (
        ([lambda: [here], missing], MissingError),
        ([missing, list], DriftError),
    ):
        with pytest.raises(
            DriftError, match=r"a\.txt: no b; other code of this fix is there"
        ) as half:
            together(*places)
        assert type(half.value) is kind
