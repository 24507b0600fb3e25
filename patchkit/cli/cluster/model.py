"""Fetch, copy, check and list models: `patchkit model`."""

import functools
from collections.abc import Sequence

import click

from patchkit.cli.cluster.cluster_options import (
    cluster_option,
    node_fields,
    sent_amount,
)
from patchkit.cli.out import (
    Shown,
    bold,
    dim,
    next_verb,
    progress,
    record_fields,
    style,
    table,
    tell,
)
from patchkit.cli.render import (
    BAD,
    GOOD,
    UNSURE,
    Blocks,
    ExitCode,
    Row,
    VerbGroup,
    finding_blocks,
    gigabytes,
    note,
    options_of,
    rendered,
)
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.pinning import pin_model
from patchkit.cluster.models.fetch import FetchPlan, fetch_model, plan_fetch
from patchkit.cluster.models.model_files import (
    SHORT,
    ModelCheck,
    check_model,
    require_record,
    split_revision,
)
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

_Result = tuple[ModelNode, ModelCheck | PatchkitError]


@click.group(cls=VerbGroup)
def model_command() -> None:
    """Fetch a model once, copy it to the other nodes, and know that it is whole.

    A folder holds one commit: MODELS/ORG--NAME@COMMIT. `get` fetches with the `hf` of vLLM's own
    environment, `sync` copies with rsync, and `check` needs no network.
    """


@model_command.command("get")
@options_of("model-get")
@cluster_option
@rendered
def get_model(spec: str, cluster: Cluster, dry_run: bool, venv: str | None) -> Blocks:
    """Fetch the files that vLLM loads of a model, to the first node.

    Says the size first, resumes after an interrupt, and hashes every file at the end. `hf` or
    HF_TOKEN on that node knows who is logged in.
    """
    repo, revision = _find_commit(cluster, spec)
    # The file in which the commit is pinned: none with --here, or if there is no file.
    options = click.get_current_context().params
    file = None if options["here"] or not options["file"].exists() else options["file"]
    if file:
        status_of_file(file)  # raises before hours of fetching, not after them

    head = cluster.head
    python = f"{venv or cluster.venv}/bin/python"
    place = {
        "models": cluster.model_folder,
        "python": python,
        "repo": repo,
    }
    plan = head.call(FetchPlan, plan_fetch, **place, revision=revision)
    tell(bold(f"{repo}@{plan.commit}"))
    into = f"{head.destination}:{plan.folder}"
    tell(f"  {plan.files} files, {gigabytes(plan.size)}, into {into}")
    tell(f"  {gigabytes(plan.left)} to download; {gigabytes(plan.free)} free")

    if dry_run:
        yield {"plan": plan, "dry_run": True}
        yield "nothing was changed"
        return

    with progress() as report:
        bar = report(repo)
        check = head.follow(
            ModelCheck,
            bar,
            fetch_model,
            **place,
            commit=plan.commit,
        )

    is_whole = not check.exit_code
    if is_whole and file:
        pin_model(file, repo, plan.commit)

    fields = {**record_fields(check), "complete": is_whole}
    yield {"plan": plan, "dry_run": False, "check": fields}

    yield from _check_blocks(head.destination, check)

    if not is_whole:
        yield next_verb("model", "get", f"{repo}@{plan.commit}")
    elif file:
        yield f"{file} pins {repo} to {plan.commit}"
        if len(cluster.nodes) > 1:
            yield next_verb("model", "sync", repo)


@model_command.command("sync")
@options_of("model-sync")
@cluster_option
@rendered
def sync_models(specs: Sequence[str], cluster: Cluster) -> Blocks:
    """Copy models from the first node that has them whole to the others, and check them there.

    Without a name: all models that the cluster file pins. rsync copies over ssh and the cable, to
    all nodes at once; run it again after an interrupt. Every file is hashed on both sides; until
    then it lies aside, and nothing is replaced.
    """
    nodes = _model_nodes(cluster)
    if len(nodes) < 2:
        raise UsageError(
            "there is one node, and nothing to copy to",
            hint="name the nodes in cluster.toml: patchkit cluster init spark-1 spark-2",
        )
    specs = specs or tuple(cluster.models)
    if not specs:
        what = "no model is named, and none is pinned"
        raise UsageError(what, hint="name one: org/name")

    models_by_node = models_of(nodes)
    results: list[_Result] = []
    for spec in specs:
        holders = find_holders(nodes, models_by_node, *_find_commit(cluster, spec))
        with progress() as report:
            source, model, damaged_sources = find_source(holders, spec, report)
            targets = [node for node in nodes if node is not source]
            copy = functools.partial(sync_model, source, model, report=report)
            results += zip(targets, run_on_all(targets, copy), strict=True)

        for node, check in damaged_sources:
            for error in check.errors:
                words = filter(None, (f"{node.ssh}:", error.where, error.what))
                yield note(f"{' '.join(words)}; the copy of {source.ssh} is taken")

    yield from _checked_blocks(specs, results, has_source=True)


@model_command.command("check")
@options_of("model-check")
@cluster_option
@rendered
def check_models(spec: str, cluster: Cluster) -> Blocks:
    """Check on every node that a model is complete and right; needs no network.

    Hashes are compared with those that the Hub named when it was fetched.
    """
    nodes = _model_nodes(cluster)
    models_by_node = models_of(nodes)
    require_all(models_by_node)  # a silent node may have the model
    commit = _find_commit(cluster, spec)
    sources = find_holders(nodes, models_by_node, *commit, whole=False)
    folders = {node.ssh: model.folder for node, model in sources}
    is_recorded = any(model.recorded for _node, model in sources)
    with progress() as report:

        def check_on(node: ModelNode) -> ModelCheck:
            if node.ssh not in folders:
                again = quoted("patchkit", "model", "sync", spec)
                raise SourceError(f"{node.ssh}: {spec} is not there", hint=again)
            check = Remote(node.ssh).follow(
                ModelCheck,
                report(f"{node.ssh}: hashing"),
                check_model,
                folder=folders[node.ssh],
            )
            return require_record(check) if is_recorded else check

        results = run_on_all(nodes, check_on)

    pairs = list(zip(nodes, results, strict=True))
    yield from _checked_blocks([spec], pairs, has_source=any(map(_is_whole, results)))


@model_command.command("list")
@cluster_option
@rendered
def list_models(cluster: Cluster) -> Blocks:
    """List the models of every node, and whether they are complete."""
    rows: list[Row] = []
    fields = []
    nodes = _model_nodes(cluster)
    for node, answer in zip(nodes, models_of(nodes), strict=True):
        if isinstance(answer, PatchkitError):
            fields.append(node_fields(node.ssh, answer))
            yield from _error_blocks(node.ssh, answer)
            continue

        if not answer:
            yield f"{node.ssh}: no models in {node.models}"
        models = []
        for model in answer:
            models.append({**record_fields(model), "complete": model.complete})

            name = bold(model.repo)
            commit = model.commit[:SHORT]
            size = gigabytes(model.size)
            rows.append((node.ssh, name, commit, size, _state(model)))

        fields.append({"node": node.ssh, "models": models})

    yield {"nodes": fields}
    yield from table(rows, heads=("node", "model", "commit", "size", "state"))


def _state(model: ModelCheck) -> Shown:
    if model.exit_code:
        return style("incomplete", fg="red")
    if not model.recorded:
        return style("no record", fg="yellow")
    return style("complete", fg="green")


def _model_nodes(cluster: Cluster) -> list[ModelNode]:
    folder = cluster.model_folder

    return [
        ModelNode(ssh=node.ssh, peer=node.from_head, models=folder)
        for node in cluster.members
    ]


def _find_commit(cluster: Cluster, spec: str) -> tuple[str, str]:
    """Return repository and commit of ``REPO[@COMMIT]``; without COMMIT, the pinned one."""
    repo, commit = split_revision(spec)
    return repo, commit or cluster.models.get(repo, "")


def _error_blocks(node: str, error: PatchkitError) -> Blocks:
    """Yield why a node gave no answer."""
    yield ExitCode(error.exit_code)
    is_named = error.what.startswith(node)
    yield BAD + (error.what if is_named else f"{node}: {error.what}")
    if error.hint:
        yield dim(f"  next: {error.hint}")


def _check_blocks(node: str, check: ModelCheck) -> Blocks:
    """Yield how much was copied and how fast, the verdict, and each finding."""
    yield ExitCode(check.exit_code)
    if sent := check.sent:
        yield f"{node}: {sent_amount(sent) if sent.sent else 'had it all'}"
    yield _verdict(f"{node}:{check.folder}", check)
    yield from finding_blocks(check.findings)


def _verdict(place: str, check: ModelCheck) -> Shown:
    amount = f"{check.files} files, {gigabytes(check.size)}"
    if check.exit_code:
        return BAD + f"{place}: not a whole model"

    if not check.recorded:
        text = "nothing is wrong, but there is no record to check it against"
        return UNSURE + f"{place}: {amount}; {text}"

    return GOOD + f"{place}: complete: {amount}; checked: every hash"


def _is_whole(result: ModelCheck | PatchkitError) -> bool:
    return isinstance(result, ModelCheck) and result.complete


def _checked_blocks(
    specs: Sequence[str], results: Sequence[_Result], *, has_source: bool
) -> Blocks:
    """Yield the result on each node, the code of the worst, and the command that cures it.

    ``has_source`` says whether some node has the whole model.
    """
    nodes = []
    is_broken = False
    for node, result in results:
        nodes.append(node_fields(node.ssh, result, complete=_is_whole(result)))
        if isinstance(result, PatchkitError):
            yield from _error_blocks(node.ssh, result)
        else:
            yield from _check_blocks(node.ssh, result)
            is_broken = is_broken or bool(result.exit_code)

    yield {"nodes": nodes}
    if is_broken:
        yield next_verb("model", "sync" if has_source else "get", *specs)
