"""Show what a check of the network found, and what a plan of it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from patchkit.cli.next_step import spelled
from patchkit.cli.out import Shown, style, table
from patchkit.cluster.net.netplan_file import place, render
from patchkit.cluster.net.plan import Line, NetPlan, NetPlanOptions, command
from patchkit.finding import Finding, Level

STATES = {  # as --json has them
    Level.OK: "ok",
    Level.ERROR: "failed",
    Level.WARNING: "warning",
    Level.NOTE: "note",
    Level.UNKNOWN: "not checked",
}
_MARKS = {
    Level.OK: style("✓", fg="green"),
    Level.ERROR: style("✗", fg="red", bold=True),
    Level.WARNING: style("!", fg="yellow"),
    Level.NOTE: style("-", dim=True),
    Level.UNKNOWN: style("?", fg="yellow"),
}


def mark(finding: Finding) -> Shown:
    return _MARKS[finding.level]


def reasons(finding: Finding) -> Iterator[str]:
    """Yield why a finding matters and what to do."""
    for label, words in (("why", finding.why), ("next", spelled(finding.hint))):
        if words:
            yield style(f"   {label + ':':<5} {words}", dim=True)


def fields(finding: Finding) -> dict[str, str]:
    return {
        "subject": finding.where,
        "what": finding.about,
        "state": STATES[finding.level],
        "seen": finding.what,
        "why": finding.why,
        "next": finding.hint,
    }


# A plan


def verdict(plan: NetPlan, notes: Sequence[Finding]) -> str:
    """Return in one line whether there is something to do."""
    changes, lines = len(plan.changes), len(plan.lines)
    if changes:
        return f"{changes} of {lines} interfaces {'change' if changes > 1 else 'changes'}"
    if any(note.level in (Level.ERROR, Level.WARNING) for note in notes):
        return "no address has to change, but see what is said below"
    return "this network is fine already: nothing to do"


def plan_lines(plan: NetPlan, notes: Sequence[Finding]) -> Iterator[str]:
    """Yield the verdict, a row for each interface, and what to know."""
    yield style(verdict(plan, notes), bold=True)
    yield from table(map(_row, plan.lines), indent="  ")
    for note in notes:
        yield mark(note) + f" {note.where}: {note.about}: {note.what}"
        yield from reasons(note)


def _row(line: Line) -> tuple[str, ...]:
    action = style(line.action, fg=None if line.action == "keep" else "green")
    addresses = ", ".join(map(str, line.addresses)) or "no IPv4"
    if line.action == "replace":
        addresses += f" (was {', '.join(map(str, line.before))})"
    mtu = f"MTU {line.mtu}" + (f" (was {line.mtu_before})" if line.mtu != line.mtu_before else "")
    to = f", to node {line.peer}" if line.peer else ""
    return action, line.netdev, addresses, mtu, place(line) + to


@dataclass(frozen=True, slots=True)
class NetStep:
    """A command to run next; ``where`` is empty for here."""

    command: tuple[str, ...]
    where: str = ""


def other_node(plan: NetPlan, options: NetPlanOptions) -> Iterator[NetStep]:
    """Yield the command that plans the other end beside this one's addresses, if that is known.

    A ring is counted by node alone, and where two cages are in use the other ends are two.
    """
    has = [each for line in plan.lines for each in line.addresses]
    # Beside a drawn address there is nothing to plan: the other end draws its own.
    own = [each for each in has if not each.is_link_local] or has
    known = plan.node is not None or plan.changes
    drawn = len(own) > 1 and all(each.is_link_local for each in own)
    if not known or drawn or plan.topology in ("ring", "as found"):
        return
    there = NetPlanOptions(
        node=plan.node and (1 if plan.node > 1 else 2),
        nodes=plan.nodes,
        peers=tuple(own),
        mtu=options.mtu,
    )
    unless = "" if plan.changes else ", if it has no address yet"
    yield NetStep(("patchkit", *command("plan", there)), f"on the other node{unless}")


def plan_fields(
    plan: NetPlan, notes: Sequence[Finding], steps: Sequence[NetStep]
) -> dict[str, Any]:
    return {
        "verdict": verdict(plan, notes),
        "changes": len(plan.changes),
        "node": plan.node,
        "nodes": plan.nodes,
        "topology": plan.topology,
        "lines": [_line_fields(line) for line in plan.lines],
        "notes": [fields(note) for note in notes],
        "next": [asdict(step) for step in steps],
        "yaml": render(plan) if plan.written else "",
    }


def _line_fields(line: Line) -> dict[str, Any]:
    return {
        "action": line.action,
        **asdict(line),
        "addresses": [str(each) for each in line.addresses],
        "before": [str(each) for each in line.before],
    }
