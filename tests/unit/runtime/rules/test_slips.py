"""What is a slip and what is another name."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkit.runtime.rules.slips import slip_of

NAMES = ("openai/gpt-oss-120b", "Qwen/Qwen2.5-32B-Instruct", "microsoft/phi-4")
LETTERS = st.sampled_from("abcxyz-/")


@settings(deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_one_slip_is_found(name, data):
    place = data.draw(st.integers(0, len(name) - 1))
    if data.draw(st.booleans()):
        mistyped = name[:place] + data.draw(LETTERS) + name[place:]
    else:
        mistyped = name[:place] + data.draw(LETTERS) + name[place + 1 :]
    known = mistyped.lower() == name.lower()
    assert slip_of(mistyped, NAMES) == ("" if known else name)


@settings(deadline=None)
@given(st.text(max_size=40))
def test_what_is_far_is_nothing(text):
    assert slip_of(f"/{text}!!{text}?", NAMES) == ""
    assert slip_of(text, ()) == ""


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("openai/gpt-oss-102b", "openai/gpt-oss-120b"),  # swapped
        ("openai/gpt-oss-1200b", "openai/gpt-oss-120b"),
        ("openai/gpt-oss-130b", ""),  # another size
        ("Qwen/Qwen2.5-3B-Instruct", ""),
        ("Qwen/Qwen2.6-32B-Instruct", ""),
        ("microsoft/phi-4 ", "microsoft/phi-4"),
        ("a" * 10_000, ""),
    ],
)
def test_numbers_are_sizes_and_versions(name, meant):
    assert slip_of(name, NAMES) == meant
