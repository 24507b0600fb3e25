"""Bring a model from a node that has it whole to another one with rsync, and check it there.

The source is hashed first, against the record of its fetch: rotten files go nowhere. Files that are
sent lie aside, in ``.sync`` beside the models' folders, until they are hashed as well: a copy that
fails leaves a node with all that it had, and one that is cut short is no model yet.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from patchkit.cluster.models.hashing import (
    HASH,
    hash_files,
    hash_findings,
    unreadable_finding,
)
from patchkit.cluster.models.model_check import (
    Checking,
    ModelCheck,
    check_model,
    held_models,
    list_files,
    quick_check,
)
from patchkit.cluster.models.model_files import (
    ModelFile,
    ModelRecord,
    file_size,
    read_record,
    write_record,
)
from patchkit.cluster.models.model_folder import (
    SHORT,
    FileName,
    folder_of,
    models_folder,
    require_room,
)
from patchkit.cluster.ssh.node import Remote, check_peer, run_on_all
from patchkit.cluster.ssh.rsync import Copied, Copying, copy_files, require_rsync
from patchkit.cluster.ssh.ssh import ssh_words
from patchkit.durable.atomic import sync
from patchkit.errors import (
    HashMismatchError,
    PatchkitError,
    SourceError,
    UsageError,
    translated,
)
from patchkit.finding import Finding
from patchkit.frozen import frozen
from patchkit.quoting import quoted
from patchkit.records import RecordError, record

Progress = Callable[[int, int], None]
_ASIDE = ".sync"  # beside the folders of models: files that are not hashed yet
_ANY_SHA256 = "0" * 64  # tells by which hash a file without a record is to be named


@frozen
class ModelNode:
    """A node with models: how ssh reaches it from here, and from the other nodes."""

    ssh: str
    peer: str
    models: str


@frozen
class ModelSource:
    """A model that a node gives to others: its check, its files, and its record, if any.

    A file that the record does not name has the hash of its bytes there.
    """

    check: ModelCheck
    files: Mapping[FileName, ModelFile]
    record: ModelRecord | None = None


@frozen
class ModelStage:
    """The folder of files until they are hashed; the files that a node lacks, and those to send."""

    staging: str
    lacking: tuple[FileName, ...]
    files_to_send: tuple[FileName, ...]


def models_of(nodes: Sequence[ModelNode]) -> list[list[ModelCheck] | PatchkitError]:
    """Return the quick check of each node's models, or why it did not say."""

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
    """Return the nodes with the model, the whole one by its sizes, and the model there.

    Raises SourceError if there is none, and if commits of it differ and none was named.
    """
    holders = [
        (node, model)
        for node, model in _all_models(nodes, models_by_node)
        if model.repo == repo and _is_same_commit(model.commit, commit)
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


def _all_models(
    nodes: Sequence[ModelNode],
    models_by_node: Sequence[list[ModelCheck] | PatchkitError],
) -> Iterator[tuple[ModelNode, ModelCheck]]:
    for node, models in zip(nodes, models_by_node, strict=True):
        if not isinstance(models, PatchkitError):
            for model in models:
                yield node, model


def _is_same_commit(short: str, commit: str) -> bool:
    """Compare commits of which either may be shortened: a folder's name has its first digits."""
    return short.startswith(commit) or commit.startswith(short)


def find_source(
    holders: Sequence[tuple[ModelNode, ModelCheck]],
    spec: str,
    report: Callable[[str], Progress],
) -> tuple[ModelNode, ModelSource, list[tuple[ModelNode, ModelCheck]]]:
    """Return the first node whose files have their hashes, and those before it with their checks.

    Nodes with a record go first: without one nobody knows the hashes. A node that fails is passed
    over like one with other bytes. Raises an error that names each node and its file if there is
    none: HashMismatchError, or without any other bytes the first node's.
    """
    damaged_sources: list[tuple[ModelNode, ModelCheck]] = []
    for node, model in sorted(holders, key=lambda holder: not holder[1].recorded):
        bar = report(f"{node.ssh}: hashing")
        try:
            source = Remote(node.ssh).follow(
                ModelSource, bar, read_source, folder=model.folder
            )
        except PatchkitError as error:
            damaged_sources.append((node, _failed_check(node, model, error)))
            continue

        if not source.check.exit_code:
            return node, source, damaged_sources
        damaged_sources.append((node, source.check))

    raise _no_source_error(spec, damaged_sources)


def _failed_check(
    node: ModelNode,
    model: ModelCheck,
    error: PatchkitError,
) -> ModelCheck:
    fault = Finding(
        kind=type(error),
        what=error.what.removeprefix(f"{node.ssh}: "),
        why=error.why,
        hint=error.hint,
    )
    return replace(model, findings=(fault,))


def _no_source_error(
    spec: str,
    damaged_sources: Sequence[tuple[ModelNode, ModelCheck]],
) -> PatchkitError:
    """Return the error that names each node and the faults of its model."""
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


def read_source(folder: str) -> Generator[tuple[int, int], None, ModelSource]:
    """Hash a model where it is copied from; yield the progress in bytes."""
    place = Path(folder)
    check = yield from check_model(folder, full=True)
    if check.exit_code:
        return ModelSource(check=check, files={})

    model_record = read_record(place)
    recorded = model_record.files if model_record else {}
    unrecorded = _list_unrecorded(place, recorded)

    hashes = yield from hash_files(place, unrecorded)
    if hashes.troubles:
        faults = [
            unreadable_finding(name, trouble)
            for name, trouble in hashes.troubles.items()
        ]
        check = replace(check, findings=(*check.findings, *faults))
        return ModelSource(check=check, files={})

    hashed = {
        name: replace(unrecorded[name], digest=digest)
        for name, digest in hashes.digests.items()
    }
    return ModelSource(check=check, files={**recorded, **hashed}, record=model_record)


def _list_unrecorded(
    folder: Path,
    recorded: Mapping[str, ModelFile],
) -> dict[FileName, ModelFile]:
    """Return the files that no record names. Raises SourceError for a name that leads elsewhere."""
    sizes, _broken = list_files(folder)
    files = {
        name: {"size": size, "digest": _ANY_SHA256}
        for name, size in sizes.items()
        if name not in recorded
    }
    try:
        return record(dict[FileName, ModelFile], files)
    except RecordError as error:
        raise SourceError(
            f"{folder}: {error}", hint="rename that file, or remove it"
        ) from None


def sync_model(
    source: ModelNode,
    model: ModelSource,
    node: ModelNode,
    report: Callable[[str], Progress],
) -> ModelCheck:
    """Copy the files that a node lacks, and put them in place once their hashes are right."""
    receiver = Remote(node.ssh)
    name = model.check.folder.rpartition("/")[2]
    files = {path: asdict(file) for path, file in model.files.items()}

    bar = report(f"{node.ssh}: checking what is there")
    stage = receiver.follow(
        ModelStage,
        bar,
        stage_model,
        models=node.models,
        name=name,
        files=files,
    )
    sent = Copied(0, 0.0)
    if stage.files_to_send:
        check_peer(Remote(source.ssh), node.peer)
        bar = report(f"{node.ssh}: copying")
        sent = Remote(source.ssh).follow(
            Copied,
            bar,
            send_model,
            folder=model.check.folder,
            names=list(stage.files_to_send),
            destination=node.peer,
            target=stage.staging,
        )

    bar = report(f"{node.ssh}: checking")
    check = receiver.follow(
        ModelCheck,
        bar,
        place_model,
        models=node.models,
        name=name,
        files={path: files[path] for path in stage.lacking},
        model_record=asdict(model.record) if model.record else None,
    )
    return replace(check, sent=sent)


def stage_model(
    models: str,
    name: str,
    files: Mapping[str, object],
) -> Generator[tuple[int, int], None, ModelStage]:
    """Hash what this node has of a model, and make the room for the rest of it.

    Raises HostError without rsync, StorageError without room, UsageError for odd names.
    """
    require_rsync()
    folder, staging = _places(models, name)

    wanted = record(dict[FileName, ModelFile], files)
    with translated(at=folder):
        lacking = yield from _lacking_files(folder, wanted)
        files_to_send = yield from _lacking_files(staging, lacking)
        # A part may be longer than its file: rsync makes no room of that for another file.
        left = sum(
            max(0, file.size - _size(staging / path))
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
    """Return the folder of a model, and the folder of its files until they are hashed."""
    if folder_of(name) is None:
        raise UsageError(
            f"{name!r} is no folder of a model", hint="`patchkit model list`"
        )

    folder = (models_folder(models) / name).resolve()
    return folder, folder.parent / _ASIDE / name


def _lacking_files(
    place: Path,
    files: Mapping[str, ModelFile],
) -> Generator[tuple[int, int], None, dict[str, ModelFile]]:
    """Return the files that are not in a folder as they have to be; yield the progress."""
    present = {
        name: file for name, file in files.items() if _size(place / name) == file.size
    }

    hashes = yield from hash_files(place, present)
    return {
        name: file
        for name, file in files.items()
        if hashes.digests.get(name) != file.digest
    }


def _size(path: Path) -> int:
    return max(0, file_size(path))


def send_model(
    folder: str,
    names: Sequence[str],
    destination: str,
    target: str,
) -> Copying:
    """Copy files of a model to a node, as ``copy_files`` does."""
    *ssh, _dashes, _destination = ssh_words(destination, "-o", "ControlMaster=no")

    # Links are resolved: their targets lie on this node alone. A file that an interrupt left aside
    # is continued, whatever its time says.
    options = ("-RLtp", "--inplace", "--ignore-times")

    total = sum(_size(Path(folder, name)) for name in names)
    sources = [f"{folder}/./{name}" for name in names]
    return (yield from copy_files(options, sources, total, ssh, destination, target))


def place_model(
    models: str,
    name: str,
    files: Mapping[str, object],
    model_record: object,
) -> Checking:
    """Hash the files that lie aside, and put them in their places, the record last.

    Those with another hash are removed, and then nothing else is changed.
    """
    folder, staging = _places(models, name)
    arrived = record(dict[FileName, ModelFile], files)
    wrong = yield from hash_findings(staging, arrived)
    with translated(at=folder):
        if wrong:
            for finding in wrong:
                Path(staging, finding.where).unlink(missing_ok=True)
            check = quick_check(folder)
            return replace(check, full=True, findings=(*check.findings, *wrong))

        _move_files(staging, folder, arrived)
        if model_record is not None:
            write_record(folder, record(ModelRecord, model_record))
    return replace(quick_check(folder), full=True)


def _move_files(staging: Path, folder: Path, names: Iterable[str]) -> None:
    """Move files to their places, each in one step; what else is there stays.

    The files are brought to the disk before and after: the hashes were those of memory.
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
    with contextlib.suppress(OSError):  # another model's files are there
        staging.parent.rmdir()
