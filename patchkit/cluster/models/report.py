"""State what a node says of a model, as JSON takes it, and read it where it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from patchkit.cluster.ssh.node import Remote
from patchkit.cluster.ssh.rsync import Copied
from patchkit.errors import HashMismatchError, SourceError
from patchkit.finding import Finding, Level

T = TypeVar("T")
HASH = "hash"
"""What findings are ``about`` where a file has other bytes than those of the Hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheck:
    """The result of a check: what the folder holds, and what is wrong with it.

    ``sent`` is what was copied into it before.
    """

    folder: str
    repo: str = ""
    commit: str = ""
    files: int = 0
    size: int = 0
    full: bool
    findings: tuple[Finding, ...]
    sent: Copied | None = None

    @property
    def complete(self) -> bool:
        return not self.exit_code

    @property
    def exit_code(self) -> int:
        errors = [found for found in self.findings if found.level is Level.ERROR]
        if any(found.about == HASH for found in errors):
            return HashMismatchError.exit_code
        return SourceError.exit_code if errors else 0

    def fields(self) -> dict[str, Any]:
        # Lists, as JSON would make of them: on this machine nothing is sent.
        return {**asdict(self), "findings": [found.fields() for found in self.findings]}


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan:
    """What a fetch takes: the chosen files of a commit, in bytes, and the room there is.

    ``held`` was fetched before, ``left`` comes over the network.
    """

    repo: str
    commit: str
    folder: str
    files: int
    size: int
    of: int  # bytes of the whole repository
    held: int
    left: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldModel:
    """A model that lies on a node."""

    folder: str
    repo: str
    commit: str
    size: int
    complete: bool
    ours: bool  # it has patchkit's record


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRoom:
    """Where a model goes on a node: what is there of it, and what is free, in bytes."""

    folder: str
    held: int
    free: int


def follow_answers(
    node: Remote,
    kind: type[T],
    answers: Iterator[dict[str, Any]],
    progress: Callable[[int, int], None],
    plan: Callable[[FetchPlan], None] | None = None,
) -> T:
    """Return the ``result`` of a node's answers; hand over its progress, and its plan."""
    result = None
    for said in answers:
        if isinstance(said.get("done"), int) and isinstance(said.get("total"), int):
            progress(said["done"], said["total"])
        elif plan and "plan" in said:
            plan(node.checked(FetchPlan, said["plan"]))
        elif "result" in said:
            result = said["result"]
    return node.checked(kind, result)
