"""Explain a variable or a rule: `patchkit env explain`."""

from __future__ import annotations

from collections.abc import Iterator

import click

from patchkit.cli.out import record_fields, style, table
from patchkit.cli.render import Block, Record, fact_lines, rendered
from patchkit.errors import UsageError
from patchkit.runtime.rules.rule import in_words, routes_in_words
from patchkit.runtime.rules.spelling import nearest
from patchkit.runtime.rules.variable_rules import (
    Avoid,
    VariableRule,
    VariableRules,
    load_variable_rules,
)
from patchkit.runtime.rules.variable_values import values_by_release
from patchkit.runtime.rules.variables import (
    is_current,
    lifetime,
    other_variables,
)


@click.command()
@click.argument("name", metavar="[VARIABLE]", required=False)
@rendered
def explain(name: str | None) -> Iterator[Block]:
    """Explain what a variable does here, why, since when, who says so, and what guides say.

    VARIABLE may be the id of a rule as well. Without it: everything that has a rule.
    """
    rules = load_variable_rules()
    if name is None:
        yield from _overview_blocks(rules)
        return
    found = [entry for entry in rules.entries if name in (entry.id, *entry.variables)]
    known, other = lifetime(name), other_variables().get(name)
    if not (found or known or other):
        names = [text for entry in rules.entries for text in (*entry.variables, entry.id)]
        close = nearest(name, names)
        hint = f"did you mean {close}?" if close else "`patchkit env explain` lists the rules"
        raise UsageError(f"nothing is known of {name}", hint=hint)
    set_here = [entry for entry in found if isinstance(entry, VariableRule)]
    yield Record(
        {
            "name": name,
            "lifetime": known,
            "meaning": other.meaning if other else None,
            "rules": [{**record_fields(rule), "default": rule.default} for rule in set_here],
            "avoids": [entry for entry in found if isinstance(entry, Avoid)],
        }
    )
    yield style(name, bold=True)
    yield from (f"  {line}" for line in _lifetime_lines(name))
    for entry in found:
        yield ""
        yield from _entry_lines(entry)


def _overview_blocks(rules: VariableRules) -> Iterator[Block]:
    yield Record(rules)
    yield style("Set", bold=True)
    rows: list[tuple[str, ...]] = [
        (rule.id, "" if rule.default else "off", in_words(rule.when), _values_text(rule))
        for rule in rules.rules
    ]
    yield from table(rows, indent="  ")
    yield ""
    yield style("Better left out", bold=True)
    rows = [
        (avoid.id, avoid.severity, in_words(avoid.when), " ".join(avoid.variables))
        for avoid in rules.avoids
    ]
    yield from table(rows, indent="  ")
    yield ""
    yield "`patchkit env explain VARIABLE` says why, who says so, and what guides say."


def _values_text(rule: VariableRule) -> str:
    return " ".join(f"{name}={value}" for name, value in rule.set.items())


def _lifetime_lines(name: str) -> Iterator[str]:
    # Lifetimes are known of these two alone.
    reader = "NCCL" if name.startswith("NCCL_") else "vLLM"
    if known := lifetime(name):
        until = "on" if is_current(known) else f"to {known.last}"
        yield f"{reader} reads it from {known.first} {until}; default: {known.default or 'unset'}"
        if not is_current(known):
            yield f"{reader} after {known.last} ignores it: leave it out there"
    yield from (f"{first} to {last}: {takes}" for first, last, takes in values_by_release(name))
    if other := other_variables().get(name):
        yield f"{other.of} {other.versions}".strip() + f" reads it: {other.meaning}"


def _entry_lines(entry: VariableRule | Avoid) -> Iterator[str]:
    rows = {"when": in_words(entry.when) or "always", "why": entry.reason}
    if isinstance(entry, VariableRule):
        whose = "the same on all nodes" if entry.scope == "shared" else "each node its own"
        yield style(entry.id, fg="green") + f"  sets {_values_text(entry)}  ({whose})"
        if not entry.default:
            why = "a choice of yours" if entry.optional else "it rests on a single report"
            rows["off"] = f"{why}: --with {entry.id} turns it on"
    else:
        yield style(entry.id, fg="yellow") + f"  {entry.severity}: better left out"
        rows["instead"] = entry.instead
    rows["leads"] = routes_in_words(entry.routes)
    rows["source"] = f"{entry.source} ({entry.evidence}, confidence {entry.confidence})"
    rows["guides"] = entry.guides
    yield from fact_lines(rows)
