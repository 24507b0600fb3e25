"""Names and pages stay within tools/budget.toml."""

import pytest

from tools import budget


@pytest.mark.parametrize(
    ("table", "figures"),
    [("names", budget.name_figures()), ("docs", budget.page_figures())],
)
def test_figures_stay_within_their_limits(table: str, figures: dict[str, float]):
    limits = budget.limits()[table]
    over = {
        name: figures[name] for name, limit in limits.items() if figures[name] > limit
    }
    assert over == {}
