"""Code, names and pages stay within tools/budget.toml."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from tools import budget
from tools.readability import count_decisions, count_modules

MODULE = '''\
"""Docstring."""

def outer(first, found):
    """One line."""
    its, size = found, 1

    def inner(rows):
        return [row for row in rows if row and size]

    # a comment
    return inner((*(1, 2), *first)) if its else None
'''


def test_the_figures_of_a_module_are_those_that_are_defined(tmp_path: Path):
    path = tmp_path / "module.py"
    path.write_text(MODULE)
    counts = count_modules([path], tmp_path)
    decisions = {function.place: function.decisions for function in counts.functions}
    # inner: itself, a comprehension, an `and`; outer: itself, those two, a conditional expression.
    assert decisions == {"module.py:inner": 3, "module.py:outer": 4}
    assert (counts.choices, counts.body_lines, counts.blank_lines) == (3, 8, 2)
    assert (counts.code_lines, counts.parallel, counts.splats) == (5, 1, 1)
    # The signatures, the assignment, the comprehension's row.
    assert counts.names == Counter(["first", "found", "its", "size", "rows", "row"])
    assert counts.figures(["found", "its"])["pronouns"] == 33.3


@pytest.mark.parametrize(
    ("source", "decisions"),
    [
        ("def f():\n  return 1", 1),
        ("def f(x):\n  assert x\n  while x or y or z:\n    pass", 5),
        ("def f(x):\n  match x:\n    case 1: pass\n    case _: pass", 3),
        ("def f():\n  try:\n    pass\n  except OSError:\n    pass", 2),
    ],
)
def test_every_kind_of_decision_counts(source: str, decisions: int):
    assert count_decisions(ast.parse(source).body[0]) == decisions


@pytest.mark.parametrize(
    ("figure", "row", "is_worse"),
    [
        (5.0, {"aim": 5.0, "last": 9.0}, False),
        (9.0, {"aim": 5.0, "last": 9.0}, False),
        (9.1, {"aim": 5.0, "last": 9.0}, True),
        (5.1, {"aim": 5.0}, True),
        (
            5.1,
            {"aim": 5.0, "last": 3.0},
            True,
        ),  # it was within its aim, and stays there
        (4.9, {"aim": 5.0, "least": True}, True),
        (4.9, {"aim": 5.0, "last": 4.9, "least": True}, False),
        (4.8, {"aim": 5.0, "last": 4.9, "least": True}, True),
    ],
)
def test_the_ratchet(figure: float, row: dict, is_worse: bool):
    assert bool(budget.worsened({"x": figure}, {"x": row})) is is_worse


def test_code_is_written_no_denser_than_before():
    table = budget.limits()["air"]
    figures = budget.air_figures("patchkit", "recipes")
    assert [*figures] == [*table]
    assert budget.worsened(figures, table) == {}


@pytest.mark.parametrize(
    ("table", "figures"),
    [("names", budget.name_figures()), ("docs", budget.page_figures())],
)
def test_figures_stay_within_their_limits(table: str, figures: dict[str, float]):
    limits = budget.limits()[table]
    over = {name: figures[name] for name in figures if name in limits}
    over = {name: figure for name, figure in over.items() if figure > limits[name]}
    assert over == {}
