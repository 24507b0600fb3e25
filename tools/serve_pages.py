"""Write the reference of flags: every rule about flags and every preset, from recipes/env/."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from patchkit.runtime.rules.presets import FlagRule, FlagRules, LeaveOut, Preset
from patchkit.runtime.rules.rule import Advice, describe_condition
from tools.markdown import index, table

MADE = "<!-- Made by tools/regenerate.py from recipes/env/. Do not edit. -->\n"
INTRODUCTION = """\
What [`patchkit serve-args`](serve-args.md) goes by; `--explain` prints the same for one model and
place. *Evidence* as in [the rules about variables](env-rules.md). A rule that rests on a single
report is off, and so is what is a matter of choice: `--with ID` turns it on, `--without ID` turns a
rule off. None was tried on a GB10 by this project.
"""
PRESETS = """\
A preset's flags take the place of a rule's. The sizes are what the sources say, or parameters times
bytes; the share of the memory and the length of the context are what it was served with. The oldest
vLLM is the one that upstream names for the model, where it does. Where vLLM ships a recipe for the
GB10, a preset is as the recipe, or says why not.
"""


def page(rules: FlagRules, presets: Sequence[Preset]) -> str:
    return "\n".join(_parts(rules, presets))


def _parts(rules: FlagRules, presets: Sequence[Preset]) -> Iterator[str]:
    yield f"{MADE}# The flags of vllm serve\n\n{INTRODUCTION}"
    yield index(rule.flag for rule in rules.rules)
    yield "## What is set\n\n" + table(
        ("rule", "flag", "when", "on", "why", "evidence"), map(_rule, rules.rules)
    )
    yield "## What is left out\n\n" + table(
        ("rule", "flag", "when", "why", "evidence"), map(_left_out, rules.leave_out)
    )
    yield "## What no flag mends\n\n" + table(
        ("when", "what", "instead", "evidence"),
        (
            (describe_condition(each.when), each.says, each.instead, _evidence(each))
            for each in rules.advice
        ),
    )
    flags = ((f"`{flag}`", why) for flag, why in rules.recipe.items())
    yield "## What upstream's recipes have, and presets do not\n\n" + table(
        ("flag", "why"), flags
    )
    yield f"## Presets\n\n{PRESETS}\n" + table(
        ("model", "GiB", "Sparks", "memory", "tokens", "vLLM", "flags", "evidence"),
        map(_preset, presets),
    )


def _rule(rule: FlagRule) -> tuple[str, ...]:
    on = "yes" if rule.default else f"`--with {rule.id}`"
    flag = f"`{rule.flag} {rule.value}`" if rule.value else f"`{rule.flag}`"
    return (
        rule.id,
        flag,
        describe_condition(rule.when),
        on,
        rule.reason,
        _evidence(rule),
    )


def _left_out(rule: LeaveOut) -> tuple[str, ...]:
    flag = f"`{rule.flag} {rule.values}`" if rule.values else f"`{rule.flag}`"
    return (
        rule.id,
        flag,
        describe_condition(rule.when) or "always",
        rule.reason,
        _evidence(rule),
    )


def _preset(preset: Preset) -> tuple[str, ...]:
    flags = [
        f"`{name}`" if value is True else f"`{name} {value}`"
        for name, value in preset.flags.items()
        if value is not False
        and name not in ("--gpu-memory-utilization", "--max-model-len")
    ]
    flags += [f"`{name}={value}`" for name, value in preset.variables.items()]
    about = f"{preset.note} " if preset.note else ""
    if preset.differs:
        reasons = " ".join(f"`{name}`: {why}" for name, why in preset.differs.items())
        about += f"Not as upstream's recipe: {reasons} "
    return (
        f"{preset.id} ({preset.quantization})",
        "?" if preset.weights_gib is None else f"{preset.weights_gib:.0f}",
        "1" if preset.single else str(preset.nodes),
        str(preset.flags.get("--gpu-memory-utilization", "")),
        str(preset.flags.get("--max-model-len", "")),
        f">={preset.min_vllm}" + (f", {preset.build}" if preset.build else ""),
        " ".join(flags),
        f"{about}{preset.source} ({preset.evidence}, {preset.confidence})",
    )


def _evidence(entry: FlagRule | LeaveOut | Advice) -> str:
    return f"{entry.source} ({entry.evidence}, {entry.confidence})"
