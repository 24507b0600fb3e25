"""Offer a shell what may follow <TAB>; what it is read from is imported when a shell asks."""

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


def _model_words() -> Iterable[tuple[str, str]]:
    from patchkit.runtime.rules.presets import load_presets

    return [(preset.id, f"vLLM {preset.min_vllm} or later") for preset in load_presets()]


def _target_words() -> Iterable[tuple[str, str]]:
    from patchkit.target import targets

    return [(name, f"{it.arch_list('native')}, {it.cpu}") for name, it in targets().items()]


def _rule_words() -> Iterable[tuple[str, str]]:
    from patchkit.runtime.rules.flags import load_flag_rules
    from patchkit.runtime.rules.variable_rules import load_variable_rules

    return [(rule.id, "") for rule in (*load_variable_rules().rules, *load_flag_rules().rules)]


def _fix_words() -> list[tuple[str, str]]:
    from patchkit.patching.recipe import load_recipes

    return [(fix.id, fix.title) for recipe in load_recipes() for fix in recipe.fixes]


def _explained_words() -> Iterable[tuple[str, str]]:
    from patchkit.doctor.symptoms.symptom import symptoms
    from patchkit.patching.recipe import load_claims

    words = [(claim.id, claim.says) for claim in load_claims()]
    return _fix_words() + words + [(it.id, it.title) for it in symptoms().values()]


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


fixes = _by_prefix(_fix_words)
explained = _by_prefix(_explained_words)
rules = _by_prefix(_rule_words)
models = _by_prefix(_model_words)
target_names = _by_prefix(_target_words)
