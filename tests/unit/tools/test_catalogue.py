"""The catalogue in docs/, and the table that it and `patchkit fixes --json` are made of."""

from __future__ import annotations

import json

from click.testing import CliRunner

from patchkit.cli.patch.fixes import command
from patchkit.patching.recipe import load_recipe
from patchkit.patching.support import SupportLevel, load_support

RECIPE = load_recipe()


def test_the_table_agrees_with_what_fixes_say_they_are_for():
    """Plans of untouched releases, made by tools/regenerate.py, beside the fix's own ranges."""
    needed = {SupportLevel.REQUIRED, SupportLevel.RECOMMENDED, SupportLevel.OPTIONAL}
    rows = [
        (fix, arch, row) for fix in RECIPE.fixes for arch, row in load_support()[fix.id].items()
    ]
    for fix, arch, row in rows:
        assert list(row) == [str(version) for version in RECIPE.supported], fix.id
        for version in RECIPE.supported:
            need = fix.need(version, arch) if arch in fix.arches else None
            level = row[str(version)].value if row[str(version)] in needed else None
            assert level == (need.severity.value if need else None), (fix.id, arch, version)


def test_fixes_json_has_the_matrix():
    shown = json.loads(CliRunner().invoke(command, ["--json"]).stdout)
    by_project = {
        project: {fix["id"]: fix["releases"] for fix in shown if fix["project"] == project}
        for project in ("vllm", "nccl")
    }
    assert by_project["nccl"] == {fix.id: {} for fix in load_recipe("nccl").fixes}
    assert by_project["vllm"] == {
        fix: {mode: {r: level.value for r, level in row.items()} for mode, row in modes.items()}
        for fix, modes in load_support().items()
    }
    (one,) = {
        tuple(fix["releases"]["native"])
        for fix in json.loads(CliRunner().invoke(command, ["--version", "0.24.0", "--json"]).stdout)
    }
    assert one == ("0.24.0",)
