"""Offer a shell what may follow <TAB>: ids, releases, targets, models, variables, by prefix.

What they are read from is imported when a shell asks: no other call pays for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Completer = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]


def _by_prefix(known: Callable[[], Iterable[tuple[str, str]]]) -> Completer:
    """Return a completer of (word, help) pairs; a dash stands for an underscore, too."""

    def complete(
        _context: click.Context, _parameter: click.Parameter, begun: str
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [
            CompletionItem(word, help=about)
            for word, about in known()
            if word.startswith((begun, begun.replace("-", "_")))
        ]

    return complete


def _fixes() -> Iterable[tuple[str, str]]:
    from patchkit.patching.recipe import load_recipes

    return [(fix.id, fix.title) for recipe in load_recipes() for fix in recipe.fixes]


def _explained() -> Iterable[tuple[str, str]]:
    from patchkit.doctor.symptoms.symptom import symptoms
    from patchkit.patching.claims import load_claims

    known = ((each.id, each.title) for each in symptoms().values())
    return [*_fixes(), *((claim.id, claim.says) for claim in load_claims()), *known]


def _rules() -> Iterable[tuple[str, str]]:
    from patchkit.runtime.rules.flag_rules import load_flag_rules
    from patchkit.runtime.rules.variable_rules import load_variable_rules

    both = (*load_variable_rules().rules, *load_flag_rules().rules)
    return [(rule.id, "") for rule in both]


def _variables() -> Iterable[tuple[str, str]]:
    from patchkit.runtime.rules.variable_rules import load_variable_rules
    from patchkit.runtime.rules.variables import nccl_variables, other_variables, vllm_variables

    ruled = [(*entry.variables, entry.id) for entry in load_variable_rules().entries]
    names = {*chain(*ruled), *vllm_variables(""), *nccl_variables(""), *other_variables()}
    return [(name, "") for name in sorted(names)]


def _models() -> Iterable[tuple[str, str]]:
    from patchkit.runtime.rules.presets import load_presets

    return [(preset.id, f"vLLM {preset.min_vllm} or later") for preset in load_presets()]


def _targets() -> Iterable[tuple[str, str]]:
    from patchkit.target import targets

    return [(name, f"{each.arch_list('native')}, {each.cpu}") for name, each in targets().items()]


def _releases(project: str) -> list[str]:
    from patchkit.patching.recipe import load_recipe

    return [str(version) for version in load_recipe(project).supported]


def releases(project: str) -> Completer:
    """Complete the bare version of a project."""
    return _by_prefix(lambda: [(version, "") for version in _releases(project)])


def sources(*projects: str, files: bool = True) -> Completer:
    """Complete a release such as ``vllm==0.24.0``, newest first, or a path."""
    named = _by_prefix(
        lambda: [
            (f"{project}=={version}", "")
            for project in projects
            for version in reversed(_releases(project))
        ]
    )

    def complete(
        context: click.Context, parameter: click.Parameter, begun: str
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        found = named(context, parameter, begun)
        # Without a word to tell by, forty releases would bury the folders.
        paths = [CompletionItem(begun, type="file")] if files and "=" not in begun else []
        return [*(found if begun else []), *paths]

    return complete


fixes = _by_prefix(_fixes)
explained = _by_prefix(_explained)
rules = _by_prefix(_rules)
variables = _by_prefix(_variables)
models = _by_prefix(_models)
target_names = _by_prefix(_targets)
