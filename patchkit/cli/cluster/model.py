"""Fetch, copy, check, list and remove models: `patchkit model`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict
from types import NoneType
from typing import Any

import click

from patchkit.cli.cluster.model_options import ModelNodes, node_options
from patchkit.cli.cluster.model_view import (
    check_findings,
    check_lines,
    gigabytes,
    held_row,
    outcome_fields,
    outcome_lines,
    plan_lines,
    silent_lines,
)
from patchkit.cli.next_step import next_step, program
from patchkit.cli.out import as_json, echo, print_json, say, table
from patchkit.cli.progress import progress
from patchkit.cluster.models.check import check_model
from patchkit.cluster.models.fetch import fetch_model
from patchkit.cluster.models.names import split_revision
from patchkit.cluster.models.pins import pin
from patchkit.cluster.models.report import FetchPlan, HeldModel, ModelCheck, followed
from patchkit.cluster.models.sync import (
    ModelNode,
    SyncedModel,
    check_sources,
    models_of,
    room_for,
    sources_of,
    sync_model,
)
from patchkit.cluster.models.transfer import send_words
from patchkit.cluster.ssh.everywhere import everywhere
from patchkit.cluster.ssh.node import Remote
from patchkit.durable.atomic import status_of_file
from patchkit.errors import (
    HashMismatchError,
    HostError,
    PatchkitError,
    SourceError,
    UsageError,
)
from patchkit.finding import worst
from patchkit.quoting import quoted

_model = click.argument("spec", metavar="REPO[@COMMIT]")
_dry_run = click.option("--dry-run", is_flag=True, help="Only say what would be done.")


@click.group()
def command() -> None:
    """Fetch a model once, copy it to the other nodes, and know that it is whole.

    One folder holds one commit: MODELS/ORG--NAME@COMMIT. `get` fetches with the `hf` of vLLM's own
    environment, `sync` copies with rsync, and `check` needs no network.
    """


@command.command("get")
@click.argument("spec", metavar="REPO[@REVISION]")
@_dry_run
@node_options
@as_json
def get(spec: str, *, dry_run: bool, place: ModelNodes, as_json: bool) -> None:
    """Fetch what vLLM loads of a model, to the first node.

    Says the size first, goes on where it was, and hashes every file at the end. Who is logged in
    there is known to `hf`, or by HF_TOKEN there.
    """
    repo, revision = split_revision(spec)
    if not revision and place.cluster:
        revision = place.cluster.models.get(repo, "")
    if place.file:
        status_of_file(place.file)  # hours before it gets its line
    head = place.head
    plans: list[FetchPlan] = []

    def planned(plan: FetchPlan) -> None:
        plans.append(plan)
        if not as_json:
            echo(plan_lines(plan, head.ssh))

    node = Remote(head.ssh)
    answers = node.stream(
        dict[str, Any],
        fetch_model,
        models=head.models,
        python=place.python,
        repo=repo,
        revision=revision,
        dry_run=dry_run,
    )
    kind = NoneType if dry_run else ModelCheck
    with progress() as report:
        check = followed(node, kind, answers, report(repo), planned)
    if not plans:
        raise HostError(f"{head.ssh}: does not say what it would fetch")
    plan = plans[0]
    fields = {"plan": {**asdict(plan), "left": plan.left}, "dry_run": dry_run}
    if check is None:
        print_json(fields) if as_json else say("nothing was changed")
        return
    if check.complete and place.file:
        pin(place.file, repo, plan.commit)
    if as_json:
        print_json({**fields, "check": check.fields()})
    else:
        _show_fetched(place, plan, check)
    if code := worst(check_findings(check)):
        raise SystemExit(code)


def _show_fetched(place: ModelNodes, plan: FetchPlan, check: ModelCheck) -> None:
    echo(check_lines(check, place.head.ssh))
    if not check.complete:
        say(next_step(*program(), "model", "get", f"{plan.repo}@{plan.commit}"))
        return
    if place.file:
        say(f"{place.file} pins {plan.repo} to {plan.commit}")
    if len(place.nodes) > 1:
        say(next_step(*program(), "model", "sync", plan.repo))


@command.command("sync")
@click.argument("specs", metavar="[REPO[@COMMIT]]...", nargs=-1)
@_dry_run
@node_options
@as_json
def sync(specs: Sequence[str], *, dry_run: bool, place: ModelNodes, as_json: bool) -> None:
    """Copy models from the first node that has them whole to the others, and check them there.

    Without a name all that the cluster file pins. rsync runs there, over ssh and the cable, side by
    side; run it again after an interrupt. Every file is hashed before, and on the node that got it.
    """
    if len(place.nodes) < 2:
        raise UsageError(
            "there is one node, and nothing to copy to",
            hint="name nodes: --node spark-1 --node spark-2=192.168.100.12",
        )
    if not specs and not (specs := tuple(place.cluster.models if place.cluster else ())):
        raise UsageError("no model is named, and none is pinned", hint="name one: org/name")
    held = models_of(place.nodes)
    results: list[tuple[ModelNode, SyncedModel | PatchkitError]] = []
    for spec in specs:
        sources = sources_of(place.nodes, held, *place.wanted(spec))
        if dry_run:
            source, model = sources[0]
            others = [node for node in place.nodes if node is not source]
            _show_copies(source, model, others, as_json=as_json)
            continue
        with progress() as report:
            source, model, wrong = check_sources(sources, report)
            for reason in wrong:
                say(f"{reason}: the copy of {source.ssh} is taken", err=True)
            others = [node for node in place.nodes if node is not source]
            copy = functools.partial(sync_model, source, model, report=report)
            results += zip(others, everywhere(others, copy), strict=True)
    if not dry_run:
        _show_outcomes(place, specs, results, as_json=as_json)


def _show_copies(
    source: ModelNode, model: HeldModel, others: Sequence[ModelNode], *, as_json: bool
) -> None:
    copies = []
    for node in others:
        room = room_for(model, node, dry_run=True)
        copies.append(
            {
                "from": source.ssh,
                "to": node.ssh,
                "model": f"{model.repo}@{model.commit}",
                "size": model.size,
                "held": room.held,
                "free": room.free,
                "command": quoted(*send_words(model.folder, node.peer, room.folder)),
            }
        )
    if as_json:
        print_json({"dry_run": True, "copies": copies})
        return
    for copy in copies:
        say(f"{copy['model']}: {gigabytes(model.size)}, {copy['from']} to {copy['to']}")
        say(f"  {copy['command']}")
    say("nothing was changed")


def _show_outcomes(
    place: ModelNodes,
    specs: Sequence[str],
    results: Sequence[tuple[ModelNode, SyncedModel | ModelCheck | PatchkitError]],
    *,
    as_json: bool,
) -> None:
    """Print what came of it on each node; SystemExit with the code of the worst."""
    fields, codes = [], [0]
    for node, outcome in results:
        if isinstance(outcome, PatchkitError):
            codes.append(outcome.exit_code)
            error = {"what": outcome.what, "why": outcome.why, "next": outcome.hint}
            fields.append({"node": node.ssh, "error": error})
            shown = silent_lines(node.ssh, outcome)
        else:
            check = outcome if isinstance(outcome, ModelCheck) else outcome.check
            codes.append(worst(check_findings(check)))
            fields.append({"node": node.ssh, **outcome_fields(outcome)})
            shown = outcome_lines(outcome, node.ssh)
        if not as_json:
            echo(shown)
    if as_json:
        print_json({"nodes": fields})
    elif HashMismatchError.exit_code in codes:
        verb = "sync" if len(place.nodes) > 1 else "get"
        say(next_step(*program(), "model", verb, *specs))
    if code := max(codes):
        raise SystemExit(code)


@command.command("check")
@_model
@click.option("--quick", is_flag=True, help="Sizes, shards and links only; no hashes.")
@node_options
@as_json
def check(spec: str, *, quick: bool, place: ModelNodes, as_json: bool) -> None:
    """Check on every node that a model is complete and right; needs no network.

    Hashes are compared with those that `hf` wrote down when it fetched the files.
    """
    repo, commit = place.wanted(spec)
    held = models_of(place.nodes)
    for answer in held:
        if isinstance(answer, PatchkitError):
            raise answer
    sources = sources_of(place.nodes, held, repo, commit, whole=False)
    found = {node.ssh: model.folder for node, model in sources}
    with progress() as report:

        def look(node: ModelNode) -> ModelCheck:
            if node.ssh not in found:
                again = quoted("patchkit", "model", "sync", spec)
                raise SourceError(f"{node.ssh}: {spec} is not there", hint=again)
            wanted = {"folder": found[node.ssh], "full": not quick}
            there = Remote(node.ssh)
            answers = there.stream(dict[str, Any], check_model, **wanted)
            return followed(there, ModelCheck, answers, report(f"{node.ssh}: hashing"))

        results = everywhere(place.nodes, look)
    _show_outcomes(place, [spec], list(zip(place.nodes, results, strict=True)), as_json=as_json)


@command.command("list")
@node_options
@as_json
def show_models(*, place: ModelNodes, as_json: bool) -> None:
    """List the models of every node, and whether they are complete."""
    held = models_of(place.nodes)
    if as_json:
        print_json(
            {
                "nodes": [
                    {"node": node.ssh, "error": answer.what}
                    if isinstance(answer, PatchkitError)
                    else {"node": node.ssh, "models": [asdict(model) for model in answer]}
                    for node, answer in zip(place.nodes, held, strict=True)
                ]
            }
        )
    else:
        rows = []
        for node, answer in zip(place.nodes, held, strict=True):
            if isinstance(answer, PatchkitError):
                echo(silent_lines(node.ssh, answer))
                continue
            rows += [held_row(node.ssh, model) for model in answer]
            if not answer:
                say(f"{node.ssh}: no models in {node.models}")
        if rows:
            echo(table(rows, heads=("node", "model", "commit", "size", "state", "")))
    if code := max(answer.exit_code if isinstance(answer, PatchkitError) else 0 for answer in held):
        raise SystemExit(code)
