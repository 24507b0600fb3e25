"""The advice that circulates: complete entries, each in one place, none that a fix has by name."""

from __future__ import annotations

import re

import pytest
from packaging.specifiers import SpecifierSet

from patchkit.evidence import ESTABLISHED
from patchkit.patching.claims import load_claims
from patchkit.patching.recipe import load_recipe

RECIPE = load_recipe()
CLAIMS = load_claims()
VERDICTS = {"true", "outdated", "contested", "false", "unverified"}


def test_an_id_names_one_thing():
    names = [each.id for each in (*CLAIMS, *RECIPE.fixes)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_claim_is_complete(claim):
    for text in (claim.says, claim.why, claim.instead):
        assert text == text.strip() != ""
        assert "\n" not in text
        assert "  " not in text
    assert re.fullmatch(r"[a-z0-9_]+", claim.id)
    assert claim.verdict in VERDICTS
    assert claim.evidence
    assert all(each.claim and each.source for each in claim.evidence)
    assert {each.established for each in claim.evidence} <= set(ESTABLISHED)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_verdict_fits_its_releases(claim):
    covered = [v for v in RECIPE.supported if v in SpecifierSet(claim.versions)]
    assert covered
    if claim.verdict == "outdated":
        assert RECIPE.newest not in covered, "what holds today is not outdated"
    if claim.verdict in {"false", "unverified"}:
        assert claim.versions == "", "it held nowhere"
