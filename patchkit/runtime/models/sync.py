"""Bring a model from the node that has it to another one, and check it there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from patchkit.errors import PatchkitError, SourceError
from patchkit.quoting import quoted
from patchkit.runtime.models.fetch import check_anew
from patchkit.runtime.models.held import held_models
from patchkit.runtime.models.report import (
    HeldModel,
    ModelCheck,
    ModelRoom,
    SentModel,
    followed,
)
from patchkit.runtime.models.transfer import make_room, send_model
from patchkit.runtime.remote.everywhere import everywhere
from patchkit.runtime.remote.node import Remote

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNode:
    """A node with models: how ssh reaches it from here, and from the other nodes."""

    ssh: str
    peer: str
    models: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncedModel:
    """A model on another node: what went there, and what the full check says."""

    node: ModelNode
    sent: SentModel
    check: ModelCheck


def models_of(nodes: Sequence[ModelNode]) -> list[list[HeldModel] | PatchkitError]:
    """Return the models of each node, or why it did not say."""

    def ask(node: ModelNode) -> list[HeldModel]:
        return Remote(node.ssh).call(list[HeldModel], held_models, models=node.models)

    return everywhere(nodes, ask)


def source_of(
    nodes: Sequence[ModelNode],
    held: Sequence[list[HeldModel] | PatchkitError],
    repo: str,
    commit: str,
) -> tuple[ModelNode, HeldModel]:
    """Return the first node with the whole model, and the model there.

    Raises SourceError if there is none, and if commits of it differ and none was named.
    """
    found = [
        (node, model)
        for node, models in zip(nodes, held, strict=True)
        if not isinstance(models, PatchkitError)
        for model in models
        if model.repo == repo and model.commit.startswith(commit) and model.complete
    ]
    commits = sorted({model.commit for _node, model in found})
    if len(commits) != 1:
        what = ", ".join(each[:12] for each in commits)
        named = f"{repo}{commit and '@'}{commit}"
        raise SourceError(
            f"{named}: several commits of it are there: {what}"
            if commits
            else f"{named}: no node has the whole model",
            hint=quoted("patchkit", "model", "sync", f"{repo}@{commits[0][:12]}")
            if commits
            else quoted("patchkit", "model", "get", named),
        )
    return found[0]


def room_for(model: HeldModel, node: ModelNode, *, dry_run: bool = False) -> ModelRoom:
    """Return where a model goes on a node, and make its folder; raises what ``make_room`` does."""
    name = model.folder.rpartition("/")[2]
    wanted = {"models": node.models, "name": name, "size": model.size, "dry_run": dry_run}
    return Remote(node.ssh).call(ModelRoom, make_room, **wanted)


def sync_model(
    source: ModelNode, model: HeldModel, node: ModelNode, report: Callable[[str], Progress]
) -> SyncedModel:
    """Copy a model to a node and hash it there."""
    room = room_for(model, node)
    here, other = Remote(source.ssh), Remote(node.ssh)
    wanted = {"folder": model.folder, "destination": node.peer, "target": room.folder}
    sending = here.stream(dict[str, Any], send_model, **wanted)
    sent = followed(here, SentModel, sending, report(f"{node.ssh}: copying"))
    checking = other.stream(dict[str, Any], check_anew, folder=room.folder)
    check = followed(other, ModelCheck, checking, report(f"{node.ssh}: checking"))
    return SyncedModel(node=node, sent=sent, check=check)
