"""Read figures of a real run on an H100, and claim of them only what their spread allows."""

import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchkit.cluster.bench.rounds import (
    MAIN,
    MEASURES,
    Series,
    compare_series,
    find_changes,
    read_conditions,
    read_series,
    result_file,
)
from patchkit.errors import UsageError
from support import write_files

DATA = Path(__file__).parents[3] / "data" / "bench"


MORE, LESS = "output", "first token, median"


def of(values, figure=MORE, load="in512-out128-c1"):
    return Series(
        load=load,
        values=tuple(values),
        figure=figure,
        unit="",
        median=statistics.median(values),
    )


@pytest.mark.parametrize(
    ("first", "second", "figure", "verdict"),
    [
        ((100, 101, 102), (103, 104, 105), MORE, "better"),
        ((100, 101, 102), (103, 104, 105), LESS, "worse"),
        ((103, 104, 105), (100, 101, 102), LESS, "better"),
        ((100, 101, 103), (103, 104, 105), MORE, "within the spread"),
        ((100, 101), (200, 201, 202), MORE, "too few"),
    ],
)
def test_what_may_be_claimed(first, second, figure, verdict):
    (pair,) = compare_series([of(first, figure)], [of(second, figure)])
    assert pair.verdict == verdict


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=8), st.sampled_from(MEASURES))
def test_nothing_is_claimed_of_the_same_figures(values, measure):
    name = measure.name
    (pair,) = compare_series([of(values, name)], [of(values, name)])
    assert (pair.verdict in ("within the spread", "too few"), pair.ratio) == (True, 1)


def test_of_equals_too_three_rounds_may_lie_apart():
    """Keep what happened, a 9.0, which the fixes leave as it is; docs/bench.md says how often."""
    folders = [DATA / "h100-stock", DATA / "h100-patched"]
    stock, patched = (
        [each for each in read_series(folder) if each.figure in MAIN]
        for folder in folders
    )
    verdicts = [each.verdict for each in compare_series(stock, patched)]
    assert verdicts == ["worse", "within the spread", "within the spread"]
    before, after = map(read_conditions, folders)
    changes = {at for at, _, _ in find_changes(before, after)}
    assert changes == {"files.vllm", "nccl.path"}
    assert find_changes(before, before) == []


def test_loads_that_only_one_folder_has_are_left_out():
    one, other = of((1.0, 2.0)), of((3.0, 4.0), load="in1-out1-c1")
    (pair,) = compare_series([one, other], [of((3.0, 4.0))])
    assert (pair.first, pair.ratio) == (one, 3.5 / 1.5)


def test_folders_that_hold_nothing_and_files_that_are_none(tmp_path):
    with pytest.raises(UsageError, match="holds no results"):
        read_series(tmp_path)
    write_files(tmp_path, {result_file(tmp_path, "in1-out1-c1", 0): "[1]"})
    with pytest.raises(UsageError, match=r"1\.json: is a list, not a table"):
        read_series(tmp_path)
