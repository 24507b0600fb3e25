"""Which releases are read to tell what a fix is to each of them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from patchkit.patching.recipe import load_recipe
from tools.regenerate import levels, look_for
from tools.tables import SUPPORT

RECIPE = load_recipe()
RELEASES = list(map(str, RECIPE.supported))
TABLE = json.loads(SUPPORT.read_text(encoding="utf-8"))


@pytest.mark.parametrize("known", [TABLE, {}], ids=["a fix that was changed", "a new fix"])
@pytest.mark.parametrize("fix", RECIPE.fixes, ids=lambda fix: fix.id)
def test_a_few_releases_tell_the_levels_of_a_fix(fix, known):
    read = []

    def look(versions):
        read.extend(versions)
        support = {v: {mode: row[v] for mode, row in TABLE[fix.id].items()} for v in versions}
        return {v: SimpleNamespace(version=v, support={fix.id: support[v]}) for v in versions}

    seen = look_for(fix, known, RELEASES, look)

    assert levels(fix.id, seen, RELEASES) == TABLE[fix.id]
    assert list(seen) == sorted(read, key=RELEASES.index)
    assert len(read) == len(set(read)) <= len(RELEASES) // 2
