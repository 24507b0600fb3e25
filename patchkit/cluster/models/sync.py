"""Bring a model from the node that has it to another one with rsync, and check it there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from patchkit.cluster.models.check import check_model, held_models, is_complete
from patchkit.cluster.models.expected import CHECKED, read_record
from patchkit.cluster.models.fetch import check_anew
from patchkit.cluster.models.names import folder_of, free_bytes, models_folder, require_room
from patchkit.cluster.models.report import HeldModel, ModelCheck, ModelRoom, follow_answers
from patchkit.cluster.ssh.node import Remote, everywhere
from patchkit.cluster.ssh.rsync import Copied, copied, require_rsync, rsync_words
from patchkit.cluster.ssh.ssh import ssh_words
from patchkit.durable.failure import translated
from patchkit.errors import HashMismatchError, PatchkitError, SourceError, UsageError
from patchkit.finding import Level
from patchkit.quoting import quoted

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNode:
    """A node with models: how ssh reaches it from here, and from the other nodes."""

    ssh: str
    peer: str
    models: str


def models_of(nodes: Sequence[ModelNode]) -> list[list[HeldModel] | PatchkitError]:
    """Return the models of each node, or why it did not say."""

    def ask(node: ModelNode) -> list[HeldModel]:
        return Remote(node.ssh).call(list[HeldModel], held_models, models=node.models)

    return everywhere(nodes, ask)


def sources_of(
    nodes: Sequence[ModelNode],
    held: Sequence[list[HeldModel] | PatchkitError],
    repo: str,
    commit: str,
    *,
    whole: bool = True,
) -> list[tuple[ModelNode, HeldModel]]:
    """Return the nodes with the model, the whole one by its sizes, and the model there.

    Raises SourceError if there is none, and if commits of it differ and none was named.
    """
    found = [
        (node, model)
        for node, models in zip(nodes, held, strict=True)
        if not isinstance(models, PatchkitError)
        for model in models
        if model.repo == repo and model.commit.startswith(commit) and (model.complete or not whole)
    ]
    commits = sorted({model.commit for _node, model in found})
    if len(commits) != 1:
        spec = f"{repo}{commit and '@'}{commit}"
        if not commits:
            what = "no node has the whole model" if whole else "lies on no node"
            raise SourceError(f"{spec}: {what}", hint=quoted("patchkit", "model", "get", spec))
        raise SourceError(
            f"{spec}: several commits of it are there: {', '.join(one[:12] for one in commits)}",
            hint="`patchkit model list` shows them; name one: REPO@COMMIT",
        )
    return found


def check_sources(
    sources: Sequence[tuple[ModelNode, HeldModel]], report: Callable[[str], Progress]
) -> tuple[ModelNode, HeldModel, list[str]]:
    """Return the first source whose hashes are right, and what is wrong with those before it.

    Raises HashMismatchError if there is none.
    """
    wrong: list[str] = []
    for node, model in sources:
        there = Remote(node.ssh)
        checking = there.stream(dict[str, Any], check_model, folder=model.folder, full=True)
        check = follow_answers(there, ModelCheck, checking, report(f"{node.ssh}: checking"))
        if check.complete:
            return node, model, wrong
        errors = [error for error in check.findings if error.level is Level.ERROR]
        wrong += [f"{node.ssh}: {error.where}: {error.what}" for error in errors]
    raise HashMismatchError(
        "\n".join(wrong),
        why="no node has a whole copy to take, and nothing was copied",
        hint=quoted("patchkit", "model", "get", f"{model.repo}@{model.commit}"),
    )


def room_for(model: HeldModel, node: ModelNode) -> ModelRoom:
    """Return where a model goes on a node, and make its folder. Raises its errors."""
    name = model.folder.rpartition("/")[2]
    wanted = {"models": node.models, "name": name, "size": model.size}
    return Remote(node.ssh).call(ModelRoom, make_model_room, **wanted)


def sync_model(
    source: ModelNode, model: HeldModel, node: ModelNode, report: Callable[[str], Progress]
) -> ModelCheck:
    """Copy a model to a node and hash it there."""
    room = room_for(model, node)
    here, other = Remote(source.ssh), Remote(node.ssh)
    wanted = {"folder": model.folder, "destination": node.peer, "target": room.folder}
    # Twice: rsync keeps what has the right size and time, and the check removes what is wrong.
    for _ in range(2):
        sending = here.stream(dict[str, Any], send_model, **wanted)
        sent = follow_answers(here, Copied, sending, report(f"{node.ssh}: copying"))
        checking = other.stream(dict[str, Any], check_anew, folder=room.folder)
        check = follow_answers(other, ModelCheck, checking, report(f"{node.ssh}: checking"))
        if check.complete:
            break
    return replace(check, sent=sent)


def make_model_room(models: str, name: str, size: int) -> dict[str, Any]:
    """Return where a model goes on this node, and make its folder.

    Raises HostError without rsync, StorageError without room, UsageError for odd names.
    """
    require_rsync()
    if folder_of(name) is None:
        raise UsageError(f"{name!r} is no folder of a model", hint="`patchkit model list`")
    folder = models_folder(models) / name
    held = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    free = free_bytes(folder)
    require_room(str(folder), size - held, free)
    with translated(at=folder):
        folder.mkdir(parents=True, exist_ok=True)
    return asdict(ModelRoom(folder=str(folder), held=held, free=free))


def send_words(folder: str, destination: str, target: str) -> tuple[str, ...]:
    """Return the rsync command for a folder. Raises UsageError for what rsync takes otherwise."""
    *ssh, _dashes, _destination = ssh_words(destination, "-o", "ControlMaster=no")
    options = (
        # Links are resolved: what they lead to lies on this node alone.
        *("-rLtp", "--inplace", "--no-inc-recursive"),
        *("--exclude=*.incomplete", "--exclude=*.lock", "--exclude=.git/"),
        f"--exclude=/{CHECKED}",
    )
    return rsync_words(options, [f"{folder}/"], ssh, destination, target)


def send_model(folder: str, destination: str, target: str) -> Iterator[dict[str, Any]]:
    """Yield the progress in bytes, at last ``{"result": Copied}``.

    Raises SourceError if the model is not complete here, HostError or StorageError if rsync fails.
    """
    place = Path(folder)
    require_rsync()
    if not is_complete(place):
        name = folder_of(place.name)
        model = f"{name.repo}@{name.commit}" if name else "REPO"
        raise SourceError(
            f"{folder}: is not complete", hint=quoted("patchkit", "model", "check", model)
        )
    made = read_record(place)
    total = made.size if made else sum(f.stat().st_size for f in place.rglob("*") if f.is_file())
    took = yield from copied(send_words(folder, destination, target), total, destination)
    yield {"result": asdict(took)}
