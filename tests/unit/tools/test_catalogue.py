"""What the catalogue is made of: the table of `patchkit fixes --json`, and advice that circulates.

Entries of advice are complete, each in one place, and none has a fix's name.
"""

import json
import re
from typing import get_args

from click.testing import CliRunner
from packaging.specifiers import SpecifierSet

from patchkit.cli.patch.apply import fixes_command
from patchkit.finding import Established
from patchkit.patching.recipe import (
    load_claims,
    load_recipe,
    load_recipes,
    load_support,
)
from tools.catalogue import SupportLevel

RECIPE = load_recipe("vllm")
CLAIMS = load_claims("vllm")
VERDICTS = {"true", "outdated", "contested", "false", "unverified"}


def test_the_table_agrees_with_what_fixes_say_they_are_for():
    """Plans of untouched releases, made by tools/regenerate.py, beside the fix's own ranges."""
    needed = {SupportLevel.REQUIRED, SupportLevel.RECOMMENDED, SupportLevel.OPTIONAL}
    rows = [
        (fix, arch, row)
        for fix in RECIPE.fixes
        for arch, row in load_support("vllm")[fix.id].items()
    ]
    for fix, arch, row in rows:
        assert list(row) == [str(version) for version in RECIPE.supported], fix.id
        for version in RECIPE.supported:
            need = fix.need(version, arch)
            level = row[str(version)] if row[str(version)] in needed else None
            assert level == (need.severity.value if need else None), (
                fix.id,
                arch,
                version,
            )


def test_fixes_json_has_the_matrix():
    shown = json.loads(CliRunner().invoke(fixes_command, ["--json"]).stdout)
    by_project = {
        project: {
            fix["id"]: fix["releases"] for fix in shown if fix["project"] == project
        }
        for project in ("vllm", "nccl")
    }
    assert by_project["nccl"] == {fix.id: {} for fix in load_recipe("nccl").fixes}
    assert by_project["vllm"] == load_support("vllm")


def test_claims_are_complete_and_fit_their_releases():
    names = [each.id for each in CLAIMS] + [
        fix.id for it in load_recipes() for fix in it.fixes
    ]
    assert len(names) == len(set(names))
    for claim in CLAIMS:
        for text in (claim.says, claim.why, claim.instead):
            assert text == " ".join(text.split()) != "", claim.id
        assert re.fullmatch(r"[a-z0-9_]+", claim.id)
        assert claim.verdict in VERDICTS, claim.id
        assert claim.evidence, claim.id
        assert all(found.claim and found.source for found in claim.evidence), claim.id
        assert {found.established for found in claim.evidence} <= set(
            get_args(Established)
        ), claim.id
        covered = [v for v in RECIPE.supported if v in SpecifierSet(claim.versions)]
        assert covered, claim.id
        # What holds today is not outdated, and what is false held nowhere.
        assert claim.verdict != "outdated" or RECIPE.newest not in covered, claim.id
        assert claim.verdict not in {"false", "unverified"} or claim.versions == "", (
            claim.id
        )
