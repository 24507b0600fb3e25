"""Numbers and JSON of others: finite and bounded, or a ValueError and nothing else."""

import json

import pytest

from patchkit.foreign import (
    positive_number,
    read_count,
    read_json,
    read_number,
    whole_number,
)


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        "[Infinity]",
        "-Infinity",
        "1e999",
        "9" * 25,
        "[" * 100_000,
        "",
        "{",
        b"\xff",
        "[1,]",
    ],
)
def test_what_is_no_json(text):
    with pytest.raises(ValueError, match=r"."):
        read_json(text)


def test_json_is_what_json_says():
    value = {"a": [1, -2, 0.5, 1e-300, None, True, "NaN"], "b": {"size": (1 << 64) - 1}}
    assert read_json(json.dumps(value)) == value
    assert read_json(json.dumps(value).encode()) == value


def test_numbers_are_finite_and_counts_not_negative():
    assert (read_number("-1.5"), read_count("0"), read_count("1e9")) == (-1.5, 0.0, 1e9)
    for read, text in ((read_number, "nan"), (read_count, "-1"), (read_count, "inf")):
        with pytest.raises(ValueError, match=r"."):
            read(text)


@pytest.mark.parametrize("value", [-1, 1 << 60, 1.0, True, None, "5", 10**400])
def test_what_is_no_size(value):
    assert whole_number(5) == 5
    with pytest.raises(ValueError, match=r"."):
        whole_number(value)


@pytest.mark.parametrize(
    "value", [0, -1, float("nan"), float("inf"), 10**400, "5", None]
)
def test_what_is_no_figure(value):
    assert (positive_number(2), positive_number(0.5)) == (2.0, 0.5)
    assert positive_number(value) == 0
