"""Offer a shell what may follow <TAB>; what it is read from is imported when a shell asks.

`patchkit completion` prints the script that has a shell ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from patchkit.cli.out import data

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Completer = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]


def _words_of(kind: str) -> Iterator[tuple[str, str]]:
    """Yield the words of a kind with their help."""
    if kind == "model":
        from patchkit.runtime.rules.presets import load_presets

        yield from ((it.id, f"vLLM {it.min_vllm} or later") for it in load_presets())
    if kind == "rule":
        from patchkit.runtime.rules.flags import load_flag_rules
        from patchkit.runtime.rules.variable_rules import load_variable_rules

        rules = (*load_variable_rules().rules, *load_flag_rules().rules)
        yield from ((rule.id, "") for rule in rules)
    if kind in ("fix", "explained"):
        from patchkit.patching.recipe import load_recipes

        yield from (
            (fix.id, fix.title) for recipe in load_recipes() for fix in recipe.fixes
        )
    if kind in ("vllm", "nccl"):
        from patchkit.patching.recipe import load_recipe

        yield from (
            (str(version), "") for version in reversed(load_recipe(kind).supported)
        )
    if kind == "explained":
        from patchkit.doctor.symptoms.symptom import symptoms
        from patchkit.patching.recipe import load_claims

        yield from ((claim.id, claim.says) for claim in load_claims())
        yield from ((it.id, it.title) for it in symptoms().values())


def complete_kind(kind: str, prefix: str = "") -> Completer:
    """Return a completer of words behind a prefix; a dash stands for an underscore, too.

    Kinds are model, rule, fix, explained, and vllm and nccl, of which releases are named.
    """

    def complete(
        _context: click.Context, _parameter: click.Parameter, begun: str
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        words = ((prefix + word, text) for word, text in _words_of(kind))
        begins = (begun, begun.replace("-", "_"))
        return [
            CompletionItem(it, help=text) for it, text in words if it.startswith(begins)
        ]

    return complete


def sources(*projects: str) -> Completer:
    """Complete a release such as ``vllm==0.33.0``, newest first, or a path."""

    def complete(
        context: click.Context, parameter: click.Parameter, begun: str
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        paths = [] if "=" in begun else [CompletionItem(begun, type="file")]
        if not begun:  # forty releases would bury the folders
            return paths
        found = [
            complete_kind(name, f"{name}==")(context, parameter, begun)
            for name in projects
        ]
        return [*(item for items in found for item in items), *paths]

    return complete


fixes = complete_kind("fix")
explained = complete_kind("explained")
rules = complete_kind("rule")
models = complete_kind("model")


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print a completion script: eval "$(patchkit completion bash)"."""
    from click.shell_completion import get_completion_class

    from patchkit.cli import group  # whose verbs import this module

    found = get_completion_class(shell)
    assert found is not None
    data(found(group, {}, "patchkit", "_PATCHKIT_COMPLETE").source() + "\n")
