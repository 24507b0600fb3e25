"""No room, and not the whole, weighs more than tools/budget.toml allows."""

from __future__ import annotations

import pytest

from tools import budget

LIMITS = budget.limits()
# What is over its budget today may weigh this much and no more; the table ends when it is empty.
TODAY = LIMITS.get("today", {})


def allowed(table, name):
    return max(table[name], TODAY.get(name, 0))


@pytest.mark.parametrize("room", LIMITS["rooms"])
def test_a_room_keeps_its_budget(room):
    assert budget.room_lines()[room] <= allowed(LIMITS["rooms"], room)


def test_all_rooms_together_keep_theirs():
    assert sum(budget.room_lines().values()) <= allowed(LIMITS, "all")
    assert sum(LIMITS["rooms"].values()) <= LIMITS["all"]


@pytest.mark.parametrize("folder", LIMITS["beside"])
def test_tests_and_tools_keep_theirs(folder):
    assert budget.count_lines(folder) <= allowed(LIMITS["beside"], folder)


@pytest.mark.parametrize("figure", LIMITS["names"])
def test_names_are_words_to_grep_for(figure):
    assert budget.name_figures()[figure] <= allowed(LIMITS["names"], figure)


def test_pages_are_few_and_short():
    assert all(found <= LIMITS["docs"][name] for name, found in budget.page_figures().items())


def test_nothing_is_allowed_that_is_below_its_budget():
    tables = (LIMITS, LIMITS["rooms"], LIMITS["beside"], LIMITS["names"])
    known = {name: table[name] for table in tables for name in TODAY if name in table}
    assert known.keys() == TODAY.keys()
    assert all(TODAY[name] > known[name] for name in TODAY), "take the line out of [today]"
