import pytest

from patchkit.edit.splice import Edit, splice
from patchkit.edit.text import new_file, region, swap_text
from patchkit.errors import DriftError

SOURCE = """\
// ≥ sm_120
struct only : K {
  #if __CUDA_ARCH__ == 1200
  #endif
};
struct other : K {
  #if __CUDA_ARCH__ == 1200
  #endif
};
"""
EQUAL = "__CUDA_ARCH__ == 1200"
FAMILY = "__CUDA_ARCH__ / 10 == 120"


def test_swap_text_within_a_region():
    span = region("a.hpp", SOURCE, "struct other", "\n};")
    assert SOURCE[slice(*span)] == SOURCE[SOURCE.index("struct other") : -1]

    edits = swap_text("a.hpp", SOURCE, EQUAL, FAMILY, note="why", within=span)

    result = splice(SOURCE, edits)
    assert result == SOURCE[: span[0]] + SOURCE[span[0] :].replace(EQUAL, FAMILY)
    assert [(edit.path, edit.note) for edit in edits] == [("a.hpp", "why")]
    span = region("a.hpp", result, "struct other", "\n};")
    assert swap_text("a.hpp", result, EQUAL, FAMILY, note="why", within=span) == []


def test_swap_text_once_and_only_once():
    for text, before, after, expected in (
        ("a\nb\nc\n", "b\n", "B\n", "a\nB\nc\n"),
        ("a\nb\nc\n", "b\n", "b\nmore\n", "a\nb\nmore\nc\n"),
        ("a\nb\nc\n", "b\n", "if b\nelse b\n", "a\nif b\nelse b\nc\n"),
        ("é𝟚 b", "b", "𝟛", "é𝟚 𝟛"),
    ):
        result = splice(text, swap_text("a", text, before, after, note=""))
        assert result == expected
        assert swap_text("a", result, before, after, note="") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nnothing\n", r"^a.cu:1: 'old\(\)' found 0 times, expected 1"),
        (
            "\nold()\n\n  old(); old()\n",
            r"^a.cu:2,4,4: 'old\(\)' found 3 times, expected 1",
        ),
        (
            "new()\nnew()\n",
            r"^a.cu:1,2: 'old\(\)' found 0 times, and what replaces it 2 times",
        ),
    ],
    ids=["missing", "ambiguous", "done twice"],
)
def test_swap_text_refuses(text, message):
    with pytest.raises(DriftError, match=message):
        swap_text("a.cu", text, "old()", "new()", note="")


@pytest.mark.parametrize(
    ("opening", "closing", "message"),
    [
        ("struct", "};", r"^a.hpp:2,6: 'struct' found 2 times, expected 1"),
        ("union", "};", r"^a.hpp: 'union' found 0 times, expected 1"),
    ],
)
def test_region_needs_one_opening(opening, closing, message):
    with pytest.raises(DriftError, match=message):
        region("a.hpp", SOURCE, opening, closing)


def test_a_file_is_created_once_and_never_over_another():
    assert new_file("a.json", None, "{}\n", note="why") == [
        Edit("a.json", 0, 0, "{}\n", "why", creates=True)
    ]
    assert new_file("a.json", "{}\n", "{}\n", note="why") == []
    for other in ("", "{}", "[]\n"):
        with pytest.raises(
            DriftError, match=r"^a\.json: is there already, with another text"
        ):
            new_file("a.json", other, "{}\n", note="why")
