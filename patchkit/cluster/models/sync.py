"""Copy a model with rsync from a node that has all of it to another node, and check it there.

The files of the source are hashed first and compared with the record of their fetch, so that no
damaged file is copied. The receiver keeps new files in the staging folder, ``.sync`` beside the
models' folders, until their hashes are right: a failed copy changes no file of the model.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from patchkit.cluster.models.model_files import (
    HASH,
    SHORT,
    Checking,
    FileName,
    ModelCheck,
    ModelFile,
    ModelRecord,
    check_model,
    file_size,
    folder_of,
    hash_findings,
    held_models,
    quick_check,
    read_record,
    require_record,
    require_room,
    write_record,
)
from patchkit.cluster.ssh.answer import Steps
from patchkit.cluster.ssh.node import (
    Copied,
    Progress,
    Remote,
    require_rsync,
    run_on_all,
    send_files,
)
from patchkit.durable.atomic import sync
from patchkit.errors import (
    HashMismatchError,
    PatchkitError,
    SourceError,
    UsageError,
    translated,
)
from patchkit.finding import finding
from patchkit.frozen import frozen
from patchkit.quoting import quoted
from patchkit.reading import user_path
from patchkit.records import record

_ASIDE = ".sync"  # the folder beside those of models, for files that are not hashed yet


@frozen
class ModelNode:
    """A node and its folder of ``models``: ``ssh`` reaches it from here, ``peer`` from nodes."""

    ssh: str
    peer: str
    models: str


@frozen
class ModelSource:
    """A model to copy from a node: its check, and its record if the check found no error."""

    check: ModelCheck
    record: ModelRecord | None = None


@frozen
class ModelStage:
    """The staging folder, the files that a model lacks, and those of them not staged yet."""

    staging: str
    lacking: tuple[FileName, ...]
    files_to_send: tuple[FileName, ...]


def models_of(nodes: Sequence[ModelNode]) -> list[list[ModelCheck] | PatchkitError]:
    """Return for each node the quick checks of its models, or the error if it gave no answer."""

    def call(node: ModelNode) -> list[ModelCheck]:
        return Remote(node.ssh).call(list[ModelCheck], held_models, models=node.models)

    return run_on_all(nodes, call)


def find_holders(
    nodes: Sequence[ModelNode],
    models_by_node: Sequence[list[ModelCheck] | PatchkitError],
    repo: str,
    commit: str,
    *,
    whole: bool = True,
) -> list[tuple[ModelNode, ModelCheck]]:
    """Return the nodes that have a model, each with its quick check.

    ``commit`` may be shortened, as those of the models may be, or "" for any. If ``whole``, leave
    out models with errors. Raises SourceError if no node has the model, or if nodes have different
    commits of it.
    """
    holders = [
        (node, model)
        for node, models in zip(nodes, models_by_node, strict=True)
        if not isinstance(models, PatchkitError)
        for model in models
        if model.repo == repo
        if model.commit.startswith(commit) or commit.startswith(model.commit)
    ]
    if whole:
        holders = [(node, model) for node, model in holders if not model.exit_code]

    commits = sorted({model.commit[:SHORT] for _node, model in holders})
    spec = f"{repo}@{commit}" if commit else repo
    if not commits:
        raise SourceError(
            f"{spec}: {'no node has the whole model' if whole else 'lies on no node'}",
            hint=quoted("patchkit", "model", "get", spec),
        )
    if len(commits) > 1:
        raise SourceError(
            f"{spec}: several commits of it are there: {', '.join(commits)}",
            hint="`patchkit model list` shows them; name one: REPO@COMMIT",
        )
    return holders


def find_source(
    holders: Sequence[tuple[ModelNode, ModelCheck]],
    spec: str,
    report: Callable[[str], Progress],
) -> tuple[ModelNode, ModelSource, list[tuple[ModelNode, ModelCheck]]]:
    """Return the first node whose files have the right hashes, its model, and the nodes rejected.

    A node that fails, or whose files differ, is rejected with its check. If no node is left, raises
    an error that names the fault of each: HashMismatchError if a hash is wrong anywhere, otherwise
    an error of the first fault's kind.
    """
    damaged_sources: list[tuple[ModelNode, ModelCheck]] = []
    for node, model in holders:
        bar = report(f"{node.ssh}: hashing")
        try:
            source = Remote(node.ssh).follow(
                ModelSource, bar, read_source, folder=model.folder
            )
        except PatchkitError as error:
            what = error.what.removeprefix(f"{node.ssh}: ")
            fault = finding(type(error), "", what, error.hint, error.why)
            damaged_sources.append((node, replace(model, findings=(fault,))))
            continue

        if not source.check.exit_code:
            return node, source, damaged_sources
        damaged_sources.append((node, source.check))

    raise _no_source_error(spec, damaged_sources)


def _no_source_error(
    spec: str,
    damaged_sources: Sequence[tuple[ModelNode, ModelCheck]],
) -> PatchkitError:
    """Return the error that names each rejected node and the faults of its model."""
    faults = []
    lines = [f"{spec}: no node has it as it was fetched:"]
    for node, model in damaged_sources:
        for fault in model.errors:
            file = f"/{fault.where}" if fault.where else ""
            lines.append(f"{node.ssh}: {model.folder}{file}: {fault.what}")
            faults.append(fault)

    text = "\n".join(lines)
    again = quoted("patchkit", "model", "get", spec)
    if any(fault.about == HASH for fault in faults):
        return HashMismatchError(
            text,
            why="a disk lost bytes, or somebody changed them; nothing was copied",
            hint=again,
        )

    fault = faults[0]
    reasons = filter(None, [fault.why, "nothing was copied"])
    return fault.kind(text, why="; ".join(reasons), hint=fault.hint or again)


def read_source(folder: str) -> Steps[ModelSource]:
    """Hash a model on the node that it is copied from; yield the progress in bytes.

    If a file is wrong or unreadable, or the record missing, the check says so, and the result has
    no record.
    """
    check = require_record((yield from check_model(folder)))
    if check.exit_code:
        return ModelSource(check=check)
    return ModelSource(check=check, record=read_record(Path(folder)))


def sync_model(
    source: ModelNode,
    model: ModelSource,
    node: ModelNode,
    report: Callable[[str], Progress],
) -> ModelCheck:
    """Copy the files that a node lacks, and move them into the model if their hashes are right.

    Returns the check of the model on the node. Wrong hashes are findings of it, not exceptions.
    """
    receiver = Remote(node.ssh)
    name = model.check.folder.rpartition("/")[2]
    assert model.record
    model_record = asdict(model.record)

    bar = report(f"{node.ssh}: checking what is there")
    stage = receiver.follow(
        ModelStage,
        bar,
        stage_model,
        models=node.models,
        name=name,
        model_record=model_record,
    )
    sent = Copied(0, 0.0)
    if stage.files_to_send:
        sent = send_files(
            Remote(source.ssh),
            model.check.folder,
            stage.files_to_send,
            node.peer,
            stage.staging,
            report(f"{node.ssh}: copying"),
        )

    bar = report(f"{node.ssh}: checking")
    check = receiver.follow(
        ModelCheck,
        bar,
        place_model,
        models=node.models,
        name=name,
        lacking=list(stage.lacking),
        model_record=model_record,
    )
    return replace(check, sent=sent)


def stage_model(
    models: str,
    name: str,
    model_record: object,
) -> Steps[ModelStage]:
    """Hash what this node has of a model, and prepare the staging folder for the other files.

    Yields the progress in bytes. Raises HostError without rsync, StorageError if the disk has too
    little room, UsageError if ``name`` is not that of a model's folder.
    """
    require_rsync()
    folder, staging = _places(models, name)

    wanted = record(ModelRecord, model_record)
    with translated(at=folder):
        lacking = yield from _lacking_files(folder, wanted.files)
        files_to_send = yield from _lacking_files(staging, lacking)
        # A partial file may be longer than the whole one: the surplus is no room for other files.
        left = sum(
            max(0, file.size - max(0, file_size(staging / path)))
            for path, file in files_to_send.items()
        )
        require_room(folder, left)
        staging.mkdir(parents=True, exist_ok=True)

    return ModelStage(
        staging=str(staging),
        lacking=tuple(lacking),
        files_to_send=tuple(files_to_send),
    )


def _places(models: str, name: str) -> tuple[Path, Path]:
    """Return a model's folder and its staging folder. Raises UsageError for an invalid name."""
    if folder_of(name) is None:
        raise UsageError(
            f"{name!r} is no folder of a model", hint="`patchkit model list`"
        )

    folder = (user_path(models) / name).resolve()
    return folder, folder.parent / _ASIDE / name


def _lacking_files(
    place: Path,
    files: Mapping[str, ModelFile],
) -> Steps[dict[str, ModelFile]]:
    """Return those files that a folder lacks, or has with a wrong size or hash.

    Yields the progress of hashing in bytes.
    """
    present = {
        name: file
        for name, file in files.items()
        if file_size(place / name) == file.size
    }

    for fault in (yield from hash_findings(place, present)):
        del present[fault.where]
    return {name: file for name, file in files.items() if name not in present}


def place_model(
    models: str,
    name: str,
    lacking: Sequence[str],
    model_record: object,
) -> Checking:
    """Hash the staged files, and move them into the model's folder; write its record last.

    If a hash is wrong, remove the staged file and leave the model's folder as it is: the check that
    is returned has a finding for each such file. Yields the progress in bytes.
    """
    folder, staging = _places(models, name)
    wanted = record(ModelRecord, model_record)
    arrived = {path: wanted.files[path] for path in lacking}
    wrong = yield from hash_findings(staging, arrived)
    with translated(at=folder):
        if wrong:
            for fault in wrong:
                Path(staging, fault.where).unlink(missing_ok=True)
            check = quick_check(folder)
            return replace(check, full=True, findings=(*check.findings, *wrong))

        _move_files(staging, folder, arrived)
        write_record(folder, wanted)
    return replace(quick_check(folder), full=True)


def _move_files(staging: Path, folder: Path, names: Iterable[str]) -> None:
    """Move files from the staging folder into the model's folder; other files there stay.

    Files are synced before the move, and folders after it: the hashes may have been read from
    memory, before the disk had the bytes. Then the staging folder is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folders = {folder.parent, folder}
    for name in names:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        folders.update(
            parent for parent in target.parents if parent.is_relative_to(folder)
        )

        sync(staging / name)
        (staging / name).replace(target)

    for place in folders:
        sync(place)

    shutil.rmtree(staging)
    # It is not empty if another model has staged files in it.
    with contextlib.suppress(OSError):
        staging.parent.rmdir()
