"""The table of `nox -s lifecycle`; the nodes themselves are what that session is about."""

from __future__ import annotations

from e2e.lifecycle.page import FAILURES
from e2e.lifecycle.scenarios import SCENARIOS

EMPTY = (
    f"before\n\n<!-- {FAILURES.name}: {FAILURES.maker} -->\n\n<!-- /{FAILURES.name} -->\n\nafter\n"
)


def test_rows_are_put_in_order_and_those_of_scenarios_that_were_not_run_stay():
    rows = {name: (f"`{name}`", f"what|{name}", "7", "serves") for name in ("a", "b", "c")}
    text = FAILURES.written(EMPTY, [rows["c"], rows["a"]], "abc")
    assert FAILURES.written(text, [], "abc") == text
    text = FAILURES.written(text, [rows["b"], ("`a`", "what else", "8", "stops")], "abc")
    table = text.split("\n\n")[2].splitlines()
    assert table[2:] == [
        "| `a` | what else | 8 | stops |",
        r"| `b` | what\|b | 7 | serves |",
        r"| `c` | what\|c | 7 | serves |",
    ]
    assert text.startswith("before\n\n")
    assert text.endswith("\n\nafter\n")


def test_every_scenario_says_in_one_paragraph_what_happens():
    for name, scenario in SCENARIOS.items():
        assert "\n\n" not in (scenario.__doc__ or "\n\n"), name
