"""Complete words for a shell; the modules that know them are imported when a shell asks.

`patchkit completion` prints the script that makes a shell ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from patchkit.cli.out import data

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Completer = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]


def _named_words(kind: str) -> Iterator[tuple[str, str]]:
    """Yield the words of a kind, each with its help."""
    match kind:
        case "model":
            from patchkit.runtime.rules.presets import load_presets

            for preset in load_presets():
                yield preset.id, f"vLLM {preset.min_vllm} or later"
        case "rule":
            from patchkit.runtime.rules.flags import load_flag_rules
            from patchkit.runtime.rules.variable_rules import load_variable_rules

            for rule in (*load_variable_rules().rules, *load_flag_rules().rules):
                yield rule.id, ""
        case "fix":
            from patchkit.patching.recipe import load_recipes

            for recipe in load_recipes():
                yield from ((fix.id, fix.title) for fix in recipe.fixes)
        case "explained":
            from patchkit.doctor.symptoms.symptom import symptoms
            from patchkit.patching.recipe import load_claims

            yield from _named_words("fix")
            yield from ((claim.id, claim.says) for claim in load_claims())
            yield from ((name, row.title) for name, row in symptoms().items())
        case project:
            from patchkit.patching.recipe import load_recipe

            for version in reversed(load_recipe(project).supported):
                yield str(version), ""


def complete_kind(kind: str, prefix: str = "") -> Completer:
    """Return a completer of words behind a prefix; a dash stands for an underscore, too.

    Kinds are model, rule, fix, explained, and the projects vllm and nccl for their releases.
    """

    def complete(
        _context: click.Context, _parameter: click.Parameter, begun: str
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        spellings = (begun, begun.replace("-", "_"))
        items = []
        for word, text in _named_words(kind):
            if (prefix + word).startswith(spellings):
                items.append(CompletionItem(prefix + word, help=text))
        return items

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

        releases = []
        for name in projects:
            releases += complete_kind(name, f"{name}==")(context, parameter, begun)
        return releases + paths

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

    completion = get_completion_class(shell)
    assert completion is not None
    script = completion(group, {}, "patchkit", "_PATCHKIT_COMPLETE").source()
    data(script + "\n")
