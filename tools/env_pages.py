"""Write the reference of variables: every rule of recipes/env/rules.toml."""

from __future__ import annotations

from collections.abc import Iterator

from patchkit.runtime.rules.rule import (
    Avoid,
    Routes,
    VariableRule,
    VariableRules,
    describe_condition,
    describe_routes,
)
from tools.markdown import table

MADE = (
    "<!-- Made by tools/regenerate.py from recipes/env/rules.toml. Do not edit. -->\n"
)
INTRODUCTION = """\
What `patchkit env` sets and `patchkit check` looks for; `patchkit env explain VARIABLE` prints
the same of one variable. *Evidence*: read in the source code, measured by somebody who published
figures, documented by NVIDIA or a project, reported by several users, or a single report. A rule
that rests on a single report is off, and so is what is a matter of choice: `--with ID` turns it on,
`--without ID` turns a rule off. None was tried on a GB10 by this project. Where a rule *leads*
quantized layers is what each release's own code decides for a GB10, run by the tests.
"""


def page(rules: VariableRules) -> str:
    return "\n".join(_parts(rules))


def _parts(rules: VariableRules) -> Iterator[str]:
    yield f"{MADE}# Rules about environment variables\n\n{INTRODUCTION}"
    yield "## What is set\n\n" + table(
        ("rule", "sets", "when", "on", "why", "evidence"), map(_set, rules.rules)
    )
    yield "## What is better left out\n\n" + table(
        ("rule", "variables", "when", "", "why, and what instead", "evidence"),
        map(_avoid, rules.avoids),
    )
    yield "## What no rule mends\n\n" + table(
        ("when", "what", "instead", "evidence"),
        (
            (describe_condition(each.when), each.says, each.instead, _evidence(each))
            for each in rules.advice
        ),
    )
    yield "## What executors copy from the head to the workers\n\n" + table(
        ("executor", "vLLM", "", "how", "read in"),
        (
            (each.name, each.vllm or "all", each.copies, each.reason, each.source)
            for each in rules.executors
        ),
    )
    yield "## Where guides differ\n\n" + table(
        ("variables", "what they say", "what holds"),
        (
            (_code(each.variables), each.guides, each.reason)
            for each in rules.entries
            if each.guides
        ),
    )


def _set(rule: VariableRule) -> tuple[str, ...]:
    values = " ".join(f"`{name}={value}`" for name, value in rule.set.items())
    whose = "all nodes" if rule.scope == "shared" else "each node its own"
    on = "yes" if rule.default else f"`--with {rule.id}`"
    on += f", in the place of {rule.replaces}" if rule.replaces else ""
    why = f"{rule.reason} {_leads(rule.routes)}".strip()
    return (
        rule.id,
        f"{values} ({whose})",
        describe_condition(rule.when),
        on,
        why,
        _evidence(rule),
    )


def _avoid(avoid: Avoid) -> tuple[str, ...]:
    values = f" = `{avoid.values}`" if avoid.values else ""
    return (
        avoid.id,
        _code(avoid.variables) + values,
        describe_condition(avoid.when) or "always",
        avoid.severity,
        f"{avoid.reason} {_leads(avoid.routes)} Instead: {avoid.instead}.".replace(
            "  ", " "
        ),
        _evidence(avoid),
    )


def _leads(routes: Routes) -> str:
    return f"Leads to: {describe_routes(routes)}." if routes else ""


def _code(names: tuple[str, ...]) -> str:
    return " ".join(f"`{name}`" for name in names)


def _evidence(entry: object) -> str:
    source, evidence, confidence = (
        getattr(entry, key) for key in ("source", "evidence", "confidence")
    )
    return f"{evidence}, {confidence}: {source}"
