"""docs/env-rules.md is what the rules say."""

from __future__ import annotations

from pathlib import Path

import env_pages
from patchkit.runtime.rules import load_rules

PAGE = Path(__file__).parents[2] / "docs" / "env-rules.md"


def test_the_page_is_what_the_rules_say():
    assert PAGE.read_text(encoding="utf-8") == env_pages.page(load_rules()), (
        "run tests/regenerate.py"
    )
