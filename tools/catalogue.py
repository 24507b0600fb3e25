"""The catalogue as Markdown: the support matrix or the releases, and a page per fix."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Mapping, Sequence

from patchkit.edit.splice import git_diff
from patchkit.patching.fix import Fix
from patchkit.patching.recipe import Recipe, Support
from patchkit.source.releases import load_facts
from tools.markdown import MADE_OF_RECIPE, table
from tools.release_page import release_page


class SupportLevel(enum.StrEnum):
    """How much a release needs a fix, or why it does not need it."""

    REQUIRED = "required"
    RECOMMENDED = "recommended"
    OPTIONAL = "optional"
    UPSTREAM = "upstream"
    NOT_APPLICABLE = "not-applicable"


Row = Mapping[str, str]
"""release → level, oldest first"""

_SIGNS = {
    SupportLevel.REQUIRED: "●",
    SupportLevel.RECOMMENDED: "◐",
    SupportLevel.OPTIONAL: "○",
    SupportLevel.UPSTREAM: "✓",
    SupportLevel.NOT_APPLICABLE: "·",
}
_MEANING = {
    SupportLevel.REQUIRED: "required: on by default, a GB10 fails without it",
    SupportLevel.RECOMMENDED: "recommended: on by default",
    SupportLevel.OPTIONAL: "optional: `--with` turns it on",
    SupportLevel.UPSTREAM: "upstream has it",
    SupportLevel.NOT_APPLICABLE: "not applicable: the release or the mode has no such code",
}
_TITLES = {"native": "`--arch native` (12.1a)", "family": "`--arch family` (12.0f)"}
_INTRODUCTION = """\
What `patchkit apply` decides for untouched sources of each release, by looking at the code. For an
installed package some fixes differ; their pages say so.
"""
_MADE = (
    "<!-- Made by tools/regenerate.py from plans of every release. Do not edit. -->\n"
)


def catalogue(recipe: Recipe, support: Support) -> dict[str, str]:
    """Return path below ``reference`` → text of each page.

    Without ``support`` there is no matrix. A project whose releases are on no index has a page that
    says how each of them is verified.
    """
    home = folder(recipe.project)
    pages = {
        f"{home}/{fix.id}.md": page(fix, support.get(fix.id, {}))
        for fix in recipe.fixes
    }
    if support:
        return {"support-matrix.md": matrix(recipe, support), **pages}
    facts = load_facts(recipe.project)
    if facts.releases:
        pages[f"{recipe.project}-releases.md"] = release_page(recipe, facts)
    return pages


def folder(project: str) -> str:
    """Return the folder below ``reference`` with the pages of a project's fixes."""
    return "fixes" if project == "vllm" else f"{project}-fixes"


def matrix(recipe: Recipe, support: Support) -> str:
    """Return fix by release for both modes; neighbours that agree in everything share a column."""
    parts = [
        "# Which release needs which fix\n",
        _MADE,
        _INTRODUCTION,
        "\n".join(f"- {_SIGNS[level]} {meaning}" for level, meaning in _MEANING.items())
        + "\n",
    ]
    for mode, title in _TITLES.items():
        columns = _columns([support[fix.id][mode] for fix in recipe.fixes])
        rows = [
            [f"[{fix.id}](fixes/{fix.id}.md)"]
            + [_SIGNS[support[fix.id][mode][releases[0]]] for releases in columns]
            for fix in recipe.fixes
        ]
        parts += [f"## {title}\n", table(["fix", *map(_span, columns)], rows)]
    return "\n".join(parts)


def _columns(rows: Sequence[Row]) -> list[list[str]]:
    """Return the runs of releases that have the same level in every row."""
    runs: list[list[str]] = []
    for release in rows[0]:
        if runs and all(row[runs[-1][0]] == row[release] for row in rows):
            runs[-1].append(release)
        else:
            runs.append([release])
    return runs


def page(fix: Fix, modes: Mapping[str, Row]) -> str:
    """Return the page with everything known about one fix."""
    needs = [[n.versions, n.severity.value, n.limits, n.reason] for n in fix.needs]
    proof = inspect.getdoc(fix.prove) if fix.prove else None
    # The runs of one level: "required 0.11.1-0.22.1, upstream 0.23.0-0.33.0".
    levels = [
        f"- {_TITLES[mode]}: "
        + ", ".join(f"{row[run[0]]} {_span(run)}" for run in _columns([row]))
        for mode, row in modes.items()
    ]
    parts = [
        f"# {fix.id}\n",
        _MADE if modes else MADE_OF_RECIPE,
        f"**{fix.title}**\n",
        f"Symptom: {fix.symptom}\n",
        f"Why: {fix.why}\n",
        f"Upstream: {fix.upstream}.\n",
        "## Needed\n",
        table(["releases", "how much", "only", "because"], needs),
        "\n".join(levels) + "\n" if levels else "",
        "## How it decides\n",
        f"{inspect.getdoc(fix.look)}\n",
        f"Proved on every apply: {proof}\n" if proof else "",
        "## Evidence\n",
        table(
            ["established", "claim", "source"],
            [[e.established, e.claim, e.source] for e in fix.evidence],
        ),
        *(
            f"## Before and after, as in {each.version}\n\n"
            f"```diff\n{git_diff(each.path, each.before, each.after)}```\n"
            for each in fix.examples
        ),
    ]
    return "\n".join(part for part in parts if part)


def _span(releases: Sequence[str]) -> str:
    return releases[0] if len(releases) == 1 else f"{releases[0]}-{releases[-1]}"
