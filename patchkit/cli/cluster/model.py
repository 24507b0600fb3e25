"""Fetch, copy, check and list models: `patchkit model`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import click

from patchkit.cli.cluster.cluster_options import (
    cluster_option,
    node_fields,
    sent_amount,
)
from patchkit.cli.out import (
    Shown,
    next_step,
    program,
    record_fields,
    style,
    table,
    tell,
)
from patchkit.cli.progress import progress
from patchkit.cli.render import (
    BAD,
    GOOD,
    UNSURE,
    Block,
    ExitCode,
    Record,
    VerbGroup,
    finding_blocks,
    gigabytes,
    lead_word,
    rendered,
)
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.pinning import pin_model
from patchkit.cluster.models.fetch import FetchPlan, fetch_model, plan_fetch
from patchkit.cluster.models.model_check import ModelCheck, check_model, compare_records
from patchkit.cluster.models.model_folder import SHORT, split_revision
from patchkit.cluster.models.sync import (
    ModelNode,
    find_holders,
    find_source,
    models_of,
    sync_model,
)
from patchkit.cluster.ssh.node import Remote, require_all, run_on_all
from patchkit.durable.atomic import status_of_file
from patchkit.errors import PatchkitError, SourceError, UsageError
from patchkit.quoting import quoted

_Results = Sequence[tuple[ModelNode, ModelCheck | PatchkitError]]


@click.group(cls=VerbGroup)
def model_command() -> None:
    """Fetch a model once, copy it to the other nodes, and know that it is whole.

    One folder holds one commit: MODELS/ORG--NAME@COMMIT. `get` fetches with the `hf` of vLLM's own
    environment, `sync` copies with rsync, and `check` needs no network.
    """


@model_command.command("get")
@click.argument("spec", metavar="REPO[@REVISION]")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option(
    "--venv", metavar="DIR", help="The environment that has vLLM; default: the file's."
)
@cluster_option
@rendered
def get_model(
    spec: str, *, cluster: Cluster, dry_run: bool, venv: str | None
) -> Iterator[Block]:
    """Fetch what vLLM loads of a model, to the first node.

    Says the size first, goes on where it was, and hashes every file at the end. Who is logged in
    there is known to `hf`, or by HF_TOKEN there.
    """
    repo, revision = _find_commit(cluster, spec)
    given = click.get_current_context().params
    file = None if given["here"] or not given["file"].exists() else given["file"]
    if file:
        status_of_file(file)  # hours before it gets its line
    head = cluster.head
    python = f"{venv or cluster.file.venv}/bin/python"
    asked = {"models": cluster.file.model_folder, "python": python, "repo": repo}
    plan = head.call(FetchPlan, plan_fetch, **asked, revision=revision)
    tell(style(f"{repo}@{plan.commit}", bold=True))
    tell(
        f"  {plan.files} files, {gigabytes(plan.size)}, into {head.destination}:{plan.folder}"
    )
    tell(f"  {gigabytes(plan.left)} to download; {gigabytes(plan.free)} free")
    if dry_run:
        yield Record({"plan": plan, "dry_run": True})
        yield "nothing was changed"
        return
    with progress() as report:
        check = head.follow(
            ModelCheck, report(repo), fetch_model, **asked, commit=plan.commit
        )
    whole = not check.exit_code
    if whole and file:
        pin_model(file, repo, plan.commit)
    fields = {**record_fields(check), "complete": whole}
    yield Record({"plan": plan, "dry_run": False, "check": fields})
    yield from _check_blocks(head.destination, check)
    if not whole:
        yield next_step(*program(), "model", "get", f"{repo}@{plan.commit}")
    elif file:
        yield f"{file} pins {repo} to {plan.commit}"
        if len(cluster.nodes) > 1:
            yield next_step(*program(), "model", "sync", repo)


@model_command.command("sync")
@click.argument("specs", metavar="[REPO[@COMMIT]]...", nargs=-1)
@cluster_option
@rendered
def sync_models(specs: Sequence[str], *, cluster: Cluster) -> Iterator[Block]:
    """Copy models from the first node that has them whole to the others, and check them there.

    Without a name all that the cluster file pins. rsync runs there, over ssh and the cable, side by
    side; run it again after an interrupt. Every file is hashed where it comes from and where it
    goes; until then it lies aside, and nothing is replaced.
    """
    nodes = _model_nodes(cluster)
    if len(nodes) < 2:
        raise UsageError(
            "there is one node, and nothing to copy to",
            hint="name the nodes in cluster.toml: patchkit cluster init spark-1 spark-2",
        )
    if not specs and not (specs := tuple(cluster.file.models)):
        raise UsageError(
            "no model is named, and none is pinned", hint="name one: org/name"
        )
    models_by_node = models_of(nodes)
    results: list[tuple[ModelNode, ModelCheck | PatchkitError]] = []
    for spec in specs:
        holders = find_holders(nodes, models_by_node, *_find_commit(cluster, spec))
        with progress() as report:
            source, model, damaged_sources = find_source(holders, spec, report)
            others = [node for node in nodes if node is not source]
            copy = functools.partial(sync_model, source, model, report=report)
            results += zip(others, run_on_all(others, copy), strict=True)
        for node, check in damaged_sources:
            for finding in check.errors:
                text = " ".join(
                    filter(None, [f"{node.ssh}:", finding.where, finding.what])
                )
                yield lead_word("note") + f"{text}; the copy of {source.ssh} is taken"
    yield from _checked_blocks(specs, results, source=True)


@model_command.command("check")
@click.argument("spec", metavar="REPO[@COMMIT]")
@click.option("--quick", is_flag=True, help="Sizes, shards and links only; no hashes.")
@cluster_option
@rendered
def check_models(spec: str, *, cluster: Cluster, quick: bool) -> Iterator[Block]:
    """Check on every node that a model is complete and right; needs no network.

    Hashes are compared with those that the Hub named when it was fetched.
    """
    nodes = _model_nodes(cluster)
    models_by_node = models_of(nodes)
    require_all(models_by_node)  # a node that is silent is no node without the model
    sources = find_holders(
        nodes, models_by_node, *_find_commit(cluster, spec), whole=False
    )
    found = {node.ssh: model.folder for node, model in sources}
    with progress() as report:

        def check_on(node: ModelNode) -> ModelCheck:
            if node.ssh not in found:
                again = quoted("patchkit", "model", "sync", spec)
                raise SourceError(f"{node.ssh}: {spec} is not there", hint=again)
            asked = {"folder": found[node.ssh], "full": not quick}
            bar = report(f"{node.ssh}: hashing")
            return Remote(node.ssh).follow(ModelCheck, bar, check_model, **asked)

        results = run_on_all(nodes, check_on)
    results = compare_records(results)
    whole = any(
        isinstance(result, ModelCheck) and result.complete for result in results
    )
    yield from _checked_blocks(
        [spec], list(zip(nodes, results, strict=True)), source=whole
    )


@model_command.command("list")
@cluster_option
@rendered
def list_models(*, cluster: Cluster) -> Iterator[Block]:
    """List the models of every node, and whether they are complete."""
    rows: list[tuple[str, ...]] = []
    fields = []
    nodes = _model_nodes(cluster)
    for node, answer in zip(nodes, models_of(nodes), strict=True):
        if isinstance(answer, PatchkitError):
            fields.append(node_fields(node.ssh, answer))
            yield from _check_blocks(node.ssh, answer)
            continue
        models = [
            {**record_fields(check), "complete": check.complete} for check in answer
        ]
        fields.append({"node": node.ssh, "models": models})
        if not answer:
            yield f"{node.ssh}: no models in {node.models}"
        for model in answer:
            name = style(model.repo, bold=True)
            row = (
                node.ssh,
                name,
                model.commit[:SHORT],
                gigabytes(model.size),
                _state(model),
            )
            rows.append(row)
    yield Record({"nodes": fields})
    yield from table(rows, heads=("node", "model", "commit", "size", "state"))


def _state(model: ModelCheck) -> Shown:
    if model.exit_code:
        return style("incomplete", fg="red")
    if not model.recorded:
        return style("no record", fg="yellow")
    return style("complete", fg="green")


def _model_nodes(cluster: Cluster) -> list[ModelNode]:
    folder = cluster.file.model_folder
    return [
        ModelNode(ssh=it.ssh, peer=it.from_head, models=folder)
        for it in cluster.file.node
    ]


def _find_commit(cluster: Cluster, spec: str) -> tuple[str, str]:
    """Return repository and commit of ``REPO[@COMMIT]``; the pinned one if none is named."""
    repo, commit = split_revision(spec)
    return repo, commit or cluster.file.models.get(repo, "")


def _check_blocks(node: str, answer: ModelCheck | PatchkitError) -> Iterator[Block]:
    """Yield how much was copied and how fast, the verdict, and each finding; or what is wrong."""
    yield ExitCode(answer.exit_code)
    if isinstance(answer, PatchkitError):
        yield BAD + (
            answer.what if answer.what.startswith(node) else f"{node}: {answer.what}"
        )
        if answer.hint:
            yield style(f"  next: {answer.hint}", dim=True)
        return
    if sent := answer.sent:
        yield f"{node}: {sent_amount(sent) if sent.sent else 'had it all'}"
    place = f"{node}:{answer.folder}"
    amount = f"{answer.files} files, {gigabytes(answer.size)}"
    how = "every hash" if answer.full else "sizes, shards and links; not the hashes"
    if answer.exit_code:
        yield BAD + f"{place}: not a whole model"
    elif answer.recorded:
        yield GOOD + f"{place}: complete: {amount}; checked: {how}"
    else:
        yield (
            UNSURE
            + f"{place}: {amount}; nothing is wrong, but there is no record to check it against"
        )
    yield from finding_blocks(answer.findings)


def _checked_blocks(
    specs: Sequence[str], results: _Results, *, source: bool
) -> Iterator[Block]:
    """Yield what came of it on each node, the code of the worst, and what cures it.

    With a ``source`` some node has the whole model.
    """
    nodes = []
    for node, result in results:
        whole = isinstance(result, ModelCheck) and result.complete
        nodes.append(node_fields(node.ssh, result, complete=whole))
        yield from _check_blocks(node.ssh, result)
    yield Record({"nodes": nodes})

    broken = any(
        isinstance(result, ModelCheck) and result.exit_code for _node, result in results
    )
    if broken:
        yield next_step(*program(), "model", "sync" if source else "get", *specs)
