"""Which releases are read to tell what a fix is to each of them, and what stops the reading."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from patchkit.errors import DriftError, SourceError
from patchkit.patching.recipe import load_recipe
from tools import tables
from tools.regenerate import levels, look_for
from tools.release_values import read_values
from tools.seen import unproved
from tools.tables import SUPPORT

RECIPE = load_recipe()
RELEASES = list(map(str, RECIPE.supported))
TABLE = json.loads(SUPPORT.read_text(encoding="utf-8"))


@pytest.mark.parametrize("known", [TABLE, {}], ids=["a fix that was changed", "a new fix"])
def test_a_few_releases_tell_the_levels_of_a_fix(known):
    for fix in RECIPE.fixes:
        read = []

        def look(versions, fix=fix, read=read):
            read.extend(versions)
            support = {v: {mode: row[v] for mode, row in TABLE[fix.id].items()} for v in versions}
            return {v: SimpleNamespace(version=v, support={fix.id: support[v]}) for v in versions}

        found = look_for(fix, known, RELEASES, look)
        assert levels(fix.id, found, RELEASES) == TABLE[fix.id]
        assert list(found) == sorted(read, key=RELEASES.index), fix.id
        assert len(read) == len(set(read)) <= len(RELEASES) // 2, fix.id


def test_fixes_that_do_not_fit_are_named_with_their_files(make_tree):
    about = f"Metadata-Version: 2.1\nName: vllm\nVersion: {RELEASES[-1]}\n"
    empty = ("setup.py", "CMakeLists.txt", "cmake/utils.cmake", "vllm/__init__.py")
    tree = make_tree(RELEASES[-1], {**dict.fromkeys(empty, ""), "PKG-INFO": about})
    with pytest.raises(DriftError) as error:
        unproved(tree.root, "native")
    first, *places = error.value.what.splitlines()
    assert first == f"vLLM {RELEASES[-1]}, native: fixes do not fit"
    named = [place.strip().partition(":")[0] for place in places if "  recipes/" in place]
    assert len(named) > 5
    assert all((tables.DATA.parents[1] / path).is_file() for path in named)


def test_choices_in_an_unknown_form_are_an_error(tmp_path):
    (tmp_path / "envs.py").write_text(
        "import os\nenvironment_variables = {\n"
        '    "VLLM_MODE": env_with_choices("VLLM_MODE", "a", make()),\n}\n'
    )
    with pytest.raises(SourceError, match=r"envs\.py:3: choices in an unknown form"):
        read_values(tmp_path)
