"""No room, and not the whole, weighs more than tools/budget.toml allows."""

from tools import budget

LIMITS = budget.limits()


def test_nothing_weighs_more_than_it_may():
    rooms = budget.room_lines()
    found = {**rooms, **{folder: budget.count_lines(folder) for folder in LIMITS["beside"]}}
    found |= {**budget.name_figures(), **budget.page_figures(), "all": sum(rooms.values())}
    tables = (LIMITS[each] for each in ("rooms", "beside", "names", "docs"))
    most = {name: limit for table in tables for name, limit in table.items()}
    over = {
        name: (found[name], limit)
        for name, limit in {**most, "all": LIMITS["all"]}.items()
        if found[name] > limit
    }
    assert over == {}
    assert sum(LIMITS["rooms"].values()) <= LIMITS["all"]
