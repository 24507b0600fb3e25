"""Show models: what a fetch takes, what a check found, what was copied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from patchkit.cli import show
from patchkit.cli.out import style
from patchkit.cluster.models.report import FetchPlan, HeldModel, ModelCheck
from patchkit.cluster.models.sync import SyncedModel
from patchkit.cluster.ssh.ssh import HERE
from patchkit.errors import PatchkitError
from patchkit.finding import Finding, Level

_MARKS = {Level.ERROR: show.BAD, Level.UNKNOWN: show.word("not checked")}
_FEW = 1e8  # bytes; a speed of less says nothing


def gigabytes(size: float) -> str:
    for unit, bytes_of in (("GB", 1e9), ("MB", 1e6)):
        if size >= bytes_of / 10:
            return f"{size / bytes_of:,.1f} {unit}"
    return f"{size / 1e3:,.1f} kB"


def plan_lines(plan: FetchPlan, node: str) -> Iterator[str]:
    """Yield what is fetched, where it goes, and what of it is there."""
    where = "" if node == HERE else f"{node}:"
    yield style(f"{plan.repo}@{plan.commit}", bold=True)
    rest = f" of {gigabytes(plan.of)}" if plan.of > plan.size else ""
    yield f"  {plan.files} files, {gigabytes(plan.size)}{rest}, into {where}{plan.folder}"
    parts = ((plan.held, "are there"), (plan.left, "to download"))
    said = ", ".join(f"{gigabytes(size)} {what}" for size, what in parts if size)
    yield f"  {said}; {gigabytes(plan.free)} free"


def check_lines(check: ModelCheck, node: str) -> Iterator[str]:
    """Yield the verdict, and each finding."""
    where = f"{'' if node == HERE else f'{node}:'}{check.folder}"
    how = "every hash" if check.full else "sizes, shards and links; not the hashes"
    amount = f"{check.files} files, {gigabytes(check.size)}"
    if check.complete:
        yield show.GOOD + f"{where}: complete: {amount}; checked: {how}"
    else:
        yield show.BAD + f"{where}: not a whole model"
    for found in check.findings:
        mark = _MARKS.get(found.level, show.word("note"))
        yield "  " + mark + f"{found.where}{found.where and ': '}{found.what}"
        if found.why:
            yield style(f"    why: {found.why}", dim=True)


def check_findings(check: ModelCheck) -> list[Finding]:
    return [found.finding for found in check.findings]


def outcome_lines(outcome: SyncedModel | ModelCheck, node: str) -> Iterator[str]:
    """Yield how much went over the link and how fast, and what the check found."""
    if isinstance(outcome, ModelCheck):
        yield from check_lines(outcome, node)
        return
    sent = outcome.sent
    fast = f", {sent.speed:.2f} GB/s" if sent.sent >= _FEW else ""
    copied = f"{gigabytes(sent.sent)} in {sent.seconds:,.1f} s{fast}"
    yield f"{node}: {copied if sent.sent else 'had it all'}"
    yield from check_lines(outcome.check, node)


def outcome_fields(outcome: SyncedModel | ModelCheck) -> dict[str, Any]:
    if isinstance(outcome, ModelCheck):
        return outcome.fields()
    sent = {**asdict(outcome.sent), "gigabytes_per_second": round(outcome.sent.speed, 3)}
    return {"sent": sent, "check": outcome.check.fields()}


def held_row(node: str, model: HeldModel) -> tuple[str, ...]:
    state = style("complete", fg="green") if model.complete else style("incomplete", fg="red")
    mine = "" if model.ours else "not fetched by patchkit"
    return node, style(model.repo, bold=True), model.commit[:12], gigabytes(model.size), state, mine


def silent_lines(node: str, error: PatchkitError) -> Iterator[str]:
    """Yield why a node did not answer."""
    yield show.BAD + (error.what if error.what.startswith(node) else f"{node}: {error.what}")
    if error.hint:
        yield style(f"  next: {error.hint}", dim=True)
