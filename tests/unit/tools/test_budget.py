"""No room, and not the whole, weighs more than tools/budget.toml allows."""

import pytest

from tools import budget

LIMITS = budget.limits()


@pytest.mark.parametrize("room", LIMITS["rooms"])
def test_a_room_keeps_its_budget(room):
    assert budget.room_lines()[room] <= LIMITS["rooms"][room]


def test_all_rooms_together_keep_theirs():
    assert sum(budget.room_lines().values()) <= LIMITS["all"]
    assert sum(LIMITS["rooms"].values()) <= LIMITS["all"]


@pytest.mark.parametrize("folder", LIMITS["beside"])
def test_tests_and_tools_keep_theirs(folder):
    assert budget.count_lines(folder) <= LIMITS["beside"][folder]


@pytest.mark.parametrize("figure", LIMITS["names"])
def test_names_are_words_to_grep_for(figure):
    assert budget.name_figures()[figure] <= LIMITS["names"][figure]


def test_pages_are_few_and_short():
    assert all(found <= LIMITS["docs"][name] for name, found in budget.page_figures().items())
