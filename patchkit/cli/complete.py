"""Offer a shell what may follow <TAB>: ids, releases, targets, models, by prefix.

What they are read from is imported when a shell asks: no other call pays for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
            CompletionItem(word, help=text)
            for word, text in known()
            if word.startswith((begun, begun.replace("-", "_")))
        ]

    return complete


def _known_words(kind: str) -> Iterable[tuple[str, str]]:
    """Return the words of a kind, each with its help."""
    if kind == "models":
        from patchkit.runtime.rules.presets import load_presets

        return [(preset.id, f"vLLM {preset.min_vllm} or later") for preset in load_presets()]
    if kind == "targets":
        from patchkit.target import targets

        return [(name, f"{it.arch_list('native')}, {it.cpu}") for name, it in targets().items()]
    if kind == "rules":
        from patchkit.runtime.rules.flag_rules import load_flag_rules
        from patchkit.runtime.rules.variable_rules import load_variable_rules

        rules = (*load_variable_rules().rules, *load_flag_rules().rules)
        return [(rule.id, "") for rule in rules]

    from patchkit.doctor.symptoms.symptom import symptoms
    from patchkit.patching.claims import load_claims
    from patchkit.patching.recipe import load_recipes

    words = [(fix.id, fix.title) for recipe in load_recipes() for fix in recipe.fixes]
    if kind == "explained":
        words += [(claim.id, claim.says) for claim in load_claims()]
        words += [(symptom.id, symptom.title) for symptom in symptoms().values()]
    return words


def releases(project: str, prefix: str = "") -> Completer:
    """Complete the version of a project, newest first, behind a prefix."""

    def known() -> Iterable[tuple[str, str]]:
        from patchkit.patching.recipe import load_recipe

        return [(f"{prefix}{version}", "") for version in reversed(load_recipe(project).supported)]

    return _by_prefix(known)


def sources(*projects: str) -> Completer:
    """Complete a release such as ``vllm==0.24.0``, newest first, or a path."""

    def complete(
        context: click.Context, parameter: click.Parameter, begun: str
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        paths = [] if "=" in begun else [CompletionItem(begun, type="file")]
        if not begun:  # forty releases would bury the folders
            return paths
        found = [releases(name, f"{name}==")(context, parameter, begun) for name in projects]
        return [*(item for items in found for item in items), *paths]

    return complete


fixes = _by_prefix(lambda: _known_words("fixes"))
explained = _by_prefix(lambda: _known_words("explained"))
rules = _by_prefix(lambda: _known_words("rules"))
models = _by_prefix(lambda: _known_words("models"))
target_names = _by_prefix(lambda: _known_words("targets"))
