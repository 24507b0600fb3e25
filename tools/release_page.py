"""The releases of a project that is on no index, as Markdown: what verifies them, known bugs."""

from __future__ import annotations

from patchkit.patching.recipe import Recipe
from patchkit.source.releases import RecipeFacts, Release
from tools.markdown import MADE_OF_RECIPE, table

_INTRODUCTION = """\
From [recipes/{project}/recipe.toml](../recipes/{project}/recipe.toml), which also says where each
figure was found. Built by default: **{default}**, unless a torch or vLLM wheel in the wheelhouse
asks for another one.
"""
_NOTES = """\
- verified by: what a download has to match. Where both are named, they were computed from a clone
  of upstream's repository, and what others publish agrees. Where nothing is known, a release is
  built from a folder, from an archive with `--sha256`, or from a git commit that you name.
- {planned} were planned and proved from their real sources, without drift.
- torch: whose CUDA wheels pin that release.
- stock: what its makefiles build by default with CUDA 13; empty where that does not compile, or
  nobody has looked.
"""


def release_page(recipe: Recipe, facts: RecipeFacts) -> str:
    """Return a row per release, then what the bugs' numbers mean, and the refused releases."""
    header = ["release", "verified by", "torch", "stock", "known bugs"]
    bugs = [
        [str(number), bug.versions, bug.says, bug.instead, bug.source]
        for number, bug in enumerate(facts.bugs, 1)
    ]
    refused = [[each.versions, "; ".join(each.reasons)] for each in facts.refused]
    return "\n".join(
        [
            f"# Releases of {recipe.project.upper()}\n",
            MADE_OF_RECIPE,
            _INTRODUCTION.format(project=recipe.project, default=facts.default),
            table(header, [_row(release, recipe, facts) for release in facts.releases]),
            _NOTES.format(planned=_span(recipe, facts)),
            "## Known bugs\n",
            "No fix of patchkit mends them; they decide which release to take.\n",
            table(["", "releases", "what happens", "instead", "source"], bugs),
            "## Refused\n",
            table(["releases", "because"], refused),
        ]
    )


def _span(recipe: Recipe, facts: RecipeFacts) -> str:
    """Return the releases whose real sources were planned and proved."""
    read = [
        each for each in facts.releases if each.read and not facts.refusal(each.version)
    ]
    return f"{len(read)} releases, {read[0].version} to {read[-1].version},"


def _row(release: Release, recipe: Recipe, facts: RecipeFacts) -> list[str]:
    ways = {
        "sha256": release.sha256,
        "commit": release.commit,
    }
    covering = recipe.bugs_of(release.version)
    bugs = [str(number) for number, bug in enumerate(facts.bugs, 1) if bug in covering]
    return [
        str(release.version),
        ", ".join(way for way, known in ways.items() if known),
        ", ".join(
            series
            for series, pin in facts.torch.items()
            if pin.version == release.version
        ),
        " ".join(release.archs),
        "refused" if facts.refusal(release.version) else ", ".join(bugs),
    ]
