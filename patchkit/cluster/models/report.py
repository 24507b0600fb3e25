"""State what a node says of a model, as JSON takes it, and read it where it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from patchkit.cluster.ssh.node import Remote
from patchkit.errors import HashMismatchError, SourceError
from patchkit.finding import Finding, Level

T = TypeVar("T")
_KINDS = {kind.__name__: kind for kind in (SourceError, HashMismatchError)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SentFinding:
    """A finding on its way from a node."""

    level: Level
    where: str
    what: str
    why: str
    kind: str

    @property
    def finding(self) -> Finding:
        kind = _KINDS.get(self.kind, SourceError)
        return Finding(level=self.level, where=self.where, what=self.what, why=self.why, kind=kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheck:
    """The result of a check: what the folder holds, and what is wrong with it."""

    folder: str
    repo: str
    commit: str
    files: int
    size: int
    full: bool
    findings: tuple[SentFinding, ...]

    @property
    def complete(self) -> bool:
        return all(found.level is not Level.ERROR for found in self.findings)

    def fields(self) -> dict[str, Any]:
        # Lists, as JSON would make of them: on this machine nothing is sent.
        found = [asdict(sent) for sent in self.findings]
        return {**asdict(self), "findings": found, "complete": self.complete}


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan:
    """What a fetch takes: the chosen files of a commit, in bytes, and the room there is.

    ``held`` was fetched before.
    """

    repo: str
    commit: str
    folder: str
    files: int
    size: int
    of: int  # bytes of the whole repository
    held: int
    free: int

    @property
    def left(self) -> int:
        """Return the bytes that come over the network."""
        return max(self.size - self.held, 0)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SentModel:
    """What was copied: the model's bytes, those that went over the link, and how long it took."""

    size: int
    sent: int
    seconds: float

    @property
    def speed(self) -> float:
        """Return GB a second over the link."""
        return self.sent / 1e9 / max(self.seconds, 1e-3)


def sent_finding(found: Finding) -> SentFinding:
    return SentFinding(
        level=found.level,
        where=found.where,
        what=found.what,
        why=found.why,
        kind=found.kind.__name__,
    )


def followed(
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
    if kind is ModelCheck and isinstance(result, dict):
        result.pop("complete", None)
    return node.checked(kind, result)
