"""Bring a model from the node that has it to another one with rsync, and check it there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from patchkit.cluster.models.fetch import check_anew
from patchkit.cluster.models.model_check import ModelCheck, held_models, quick_check
from patchkit.cluster.models.names import folder_of, models_folder, require_room
from patchkit.cluster.ssh.node import Remote, everywhere
from patchkit.cluster.ssh.rsync import Copied, Copying, copy_files, require_rsync
from patchkit.cluster.ssh.ssh import ssh_words
from patchkit.errors import PatchkitError, SourceError, UsageError, translated
from patchkit.quoting import quoted

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNode:
    """A node with models: how ssh reaches it from here, and from the other nodes."""

    ssh: str
    peer: str
    models: str


def models_of(nodes: Sequence[ModelNode]) -> list[list[ModelCheck] | PatchkitError]:
    """Return the quick check of each node's models, or why it did not say."""

    return everywhere(
        nodes,
        lambda node: Remote(node.ssh).call(list[ModelCheck], held_models, models=node.models),
    )


def sources_of(
    nodes: Sequence[ModelNode],
    held: Sequence[list[ModelCheck] | PatchkitError],
    repo: str,
    commit: str,
    *,
    whole: bool = True,
) -> list[tuple[ModelNode, ModelCheck]]:
    """Return the nodes with the model, the whole one by its sizes, and the model there.

    Raises SourceError if there is none, and if commits of it differ and none was named.
    """
    found = [
        (node, model)
        for node, models in zip(nodes, held, strict=True)
        if not isinstance(models, PatchkitError)
        for model in models
        if model.repo == repo and model.commit.startswith(commit)
        if not (whole and model.exit_code)
    ]
    commits = sorted({model.commit for _node, model in found})
    spec = f"{repo}{commit and '@'}{commit}"
    if not commits:
        what = "no node has the whole model" if whole else "lies on no node"
        raise SourceError(f"{spec}: {what}", hint=quoted("patchkit", "model", "get", spec))
    if len(commits) > 1:
        raise SourceError(
            f"{spec}: several commits of it are there: {', '.join(one[:12] for one in commits)}",
            hint="`patchkit model list` shows them; name one: REPO@COMMIT",
        )
    return found


def sync_model(
    source: ModelNode, model: ModelCheck, node: ModelNode, report: Callable[[str], Progress]
) -> ModelCheck:
    """Copy a model to a node and hash it there: what is rotten at its source is so as well."""
    other, name = Remote(node.ssh), model.folder.rpartition("/")[2]
    room = {"models": node.models, "name": name, "size": model.size}
    target = other.call(str, make_model_room, **room)
    way = {"folder": model.folder, "destination": node.peer, "target": target}
    progress = report(f"{node.ssh}: copying")
    sent = Remote(source.ssh).follow(Copied, progress, send_model, **way)
    # rsync keeps what has the right size and time; the check removes what is wrong.
    progress = report(f"{node.ssh}: checking")
    check = other.follow(ModelCheck, progress, check_anew, folder=target)
    return replace(check, sent=sent)


def make_model_room(models: str, name: str, size: int) -> str:
    """Make the folder where a model goes on this node, and return it.

    Raises HostError without rsync, StorageError without room, UsageError for odd names.
    """
    require_rsync()
    if folder_of(name) is None:
        raise UsageError(f"{name!r} is no folder of a model", hint="`patchkit model list`")
    folder = models_folder(models) / name
    with translated(at=folder):
        held = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        require_room(folder, size - held)
        folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def send_model(folder: str, destination: str, target: str) -> Copying:
    """Copy a model, as ``copy_files`` does. Raises SourceError if it is not complete here."""
    model = quick_check(Path(folder))
    if model.exit_code:
        spec = f"{model.repo}@{model.commit}"
        hint = quoted("patchkit", "model", "check", spec)
        raise SourceError(f"{folder}: is not complete", hint=hint)
    *ssh, _dashes, _destination = ssh_words(destination, "-o", "ControlMaster=no")
    options = (
        # Links are resolved: what they lead to lies on this node alone.
        *("-rLtp", "--inplace", "--no-inc-recursive"),
        *("--exclude=*.incomplete", "--exclude=*.lock", "--exclude=.git/"),
    )
    sources = [f"{folder}/"]
    return (yield from copy_files(options, sources, model.size, ssh, destination, target))
