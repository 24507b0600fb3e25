"""Explain a variable or a rule: `patchkit env explain`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import click

from patchkit.cli.complete import variables
from patchkit.cli.out import echo, print_json, style, table
from patchkit.errors import UsageError
from patchkit.runtime.rules.condition import in_words
from patchkit.runtime.rules.rule import routes_in_words
from patchkit.runtime.rules.variable_rules import (
    Avoid,
    VariableRule,
    VariableRules,
    load_variable_rules,
)
from patchkit.runtime.rules.variables import (
    is_current,
    lifetime,
    nearest,
    other_variables,
    values_by_release,
)


@click.command()
@click.argument("wanted", metavar="[VARIABLE]", required=False, shell_complete=variables)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def explain(wanted: str | None, *, as_json: bool) -> None:
    """Explain what a variable does here, why, since when, who says so, and what guides say.

    VARIABLE may be the id of a rule as well. Without it: everything that has a rule.
    """
    rules = load_variable_rules()
    if wanted is None:
        _show_overview(rules, as_json=as_json)
        return
    found = [each for each in rules.entries if wanted in (each.id, *each.variables)]
    if not found and not _is_known_variable(wanted):
        raise UsageError(f"nothing is known of {wanted}", hint=_nearest_hint(rules, wanted))
    if as_json:
        print_json(_explain_fields(wanted, found))
        return
    echo(_explain_lines(wanted, found))


def _is_known_variable(name: str) -> bool:
    return lifetime(name) is not None or name in other_variables()


def _nearest_hint(rules: VariableRules, wanted: str) -> str:
    names = [name for each in rules.entries for name in (*each.variables, each.id)]
    close = nearest(wanted, names)
    return f"did you mean {close}?" if close else "`patchkit env explain` lists what has a rule"


def _show_overview(rules: VariableRules, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(rules))
        return
    echo([style("Set", bold=True)])
    echo(table((_set_row(rule) for rule in rules.rules), indent="  "))
    echo(["", style("Better left out", bold=True)])
    echo(table((_avoid_row(each) for each in rules.avoids), indent="  "))
    echo(["", "`patchkit env explain VARIABLE` says why, who says so, and what guides say."])


def _set_row(rule: VariableRule) -> tuple[str, ...]:
    on = "" if rule.default else style("off", dim=True)
    values = " ".join(f"{name}={value}" for name, value in rule.set.items())
    return rule.id, on, in_words(rule.when), values


def _avoid_row(avoid: Avoid) -> tuple[str, ...]:
    return avoid.id, avoid.severity, in_words(avoid.when), " ".join(avoid.variables)


def _explain_lines(wanted: str, found: list[VariableRule | Avoid]) -> Iterator[str]:
    yield style(wanted, bold=True)
    yield from (f"  {line}" for line in _lifetime_lines(wanted))
    for entry in found:
        yield ""
        yield from _entry_lines(entry)


def _lifetime_lines(name: str) -> Iterator[str]:
    # Lifetimes are known of these two alone.
    reader = "NCCL" if name.startswith("NCCL_") else "vLLM"
    if known := lifetime(name):
        until = "on" if is_current(known) else f"to {known.last}"
        yield f"{reader} reads it from {known.first} {until}; default: {known.default or 'unset'}"
        if not is_current(known):
            yield f"{reader} after {known.last} ignores it: leave it out there"
    for first, last, takes in values_by_release(name):
        yield f"{first} to {last}: {takes}"
    if other := other_variables().get(name):
        yield f"{other.of} {other.versions}".strip() + f" reads it: {other.meaning}"


def _entry_lines(entry: VariableRule | Avoid) -> Iterator[str]:
    rows = [("when", in_words(entry.when) or "always"), ("why", entry.reason)]
    if isinstance(entry, VariableRule):
        values = " ".join(f"{name}={value}" for name, value in entry.set.items())
        whose = "the same on all nodes" if entry.scope == "shared" else "each node its own"
        yield style(entry.id, fg="green") + f"  sets {values}  ({whose})"
        rows += [("off", _why_off(entry))]
    else:
        yield style(entry.id, fg="yellow") + f"  {entry.severity}: better left out"
        rows += [("instead", entry.instead)]
    rows += [
        ("leads", routes_in_words(entry.routes)),
        ("source", f"{entry.source} ({entry.evidence}, confidence {entry.confidence})"),
        ("guides", entry.guides),
    ]
    yield from table([row for row in rows if row[1]], indent="  ")


def _why_off(rule: VariableRule) -> str:
    if rule.default:
        return ""
    why = "a choice of yours" if rule.optional else "it rests on a single report"
    return f"{why}: --with {rule.id} turns it on"


def _explain_fields(wanted: str, found: list[VariableRule | Avoid]) -> dict[str, object]:
    known = lifetime(wanted)
    return {
        "name": wanted,
        "lifetime": asdict(known) if known else None,
        "meaning": other.meaning if (other := other_variables().get(wanted)) else None,
        "rules": [
            {**asdict(each), "default": each.default}
            for each in found
            if isinstance(each, VariableRule)
        ],
        "avoids": [asdict(each) for each in found if isinstance(each, Avoid)],
    }
