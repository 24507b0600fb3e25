"""docs/env-rules.md and docs/serve-flags.md are what the rules and presets say."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchkit.runtime.rules.flag_rules import load_flag_rules
from patchkit.runtime.rules.presets import load_presets
from patchkit.runtime.rules.variable_rules import load_variable_rules
from tools import env_pages, serve_pages

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("env-rules.md", env_pages.page(load_variable_rules())),
        ("serve-flags.md", serve_pages.page(load_flag_rules(), load_presets())),
    ],
    ids=["env-rules", "serve-flags"],
)
def test_the_page_is_what_the_rules_say(name, text):
    assert (DOCS / name).read_text(encoding="utf-8") == text, "run tools/regenerate.py"
