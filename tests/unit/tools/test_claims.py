"""The advice that circulates: complete entries, each in one place, none that a fix has by name."""

from __future__ import annotations

import re

from packaging.specifiers import SpecifierSet

from patchkit.finding import ESTABLISHED
from patchkit.patching.claims import load_claims
from patchkit.patching.recipe import load_recipe
from patchkit.paths import RECIPES

RECIPE = load_recipe()
CLAIMS = load_claims()
VERDICTS = {"true", "outdated", "contested", "false", "unverified"}


def test_an_id_names_one_thing():
    names = [each.id for each in (*CLAIMS, *RECIPE.fixes)]
    assert len(names) == len(set(names))


def test_claims_are_complete_and_fit_their_releases():
    for claim in CLAIMS:
        for text in (claim.says, claim.why, claim.instead):
            assert text == " ".join(text.split()) != "", claim.id
        assert re.fullmatch(r"[a-z0-9_]+", claim.id)
        assert claim.verdict in VERDICTS, claim.id
        assert claim.evidence, claim.id
        assert all(found.claim and found.source for found in claim.evidence), claim.id
        assert {found.established for found in claim.evidence} <= set(ESTABLISHED), claim.id
        covered = [v for v in RECIPE.supported if v in SpecifierSet(claim.versions)]
        assert covered, claim.id
        # What holds today is not outdated, and what is false held nowhere.
        assert claim.verdict != "outdated" or RECIPE.newest not in covered, claim.id
        assert claim.verdict not in {"false", "unverified"} or claim.versions == "", claim.id


def test_who_cites_the_hang_of_nccl_says_which_release_cured_it():
    texts = [path.read_text(encoding="utf-8") for path in RECIPES.rglob("*.toml")]
    citing = [line for text in texts for line in text.splitlines() if "52504" in line]
    assert len(citing) > 6
    assert not [line for line in citing if "2.30.4" not in line]
