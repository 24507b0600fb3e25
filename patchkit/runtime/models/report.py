"""State what a node says of a model, as JSON takes it, and read it where it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from patchkit.errors import HashMismatchError, HostError, SourceError
from patchkit.finding import Finding, Level
from patchkit.records import RecordError, record

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
        return all(each.level is not Level.ERROR for each in self.findings)

    def fields(self) -> dict[str, Any]:
        # Lists, as JSON would make of them: on this machine nothing is sent.
        found = [asdict(each) for each in self.findings]
        return {**asdict(self), "findings": found, "complete": self.complete}


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan:
    """What a fetch takes: the chosen files of a commit, in bytes, and the room there is.

    ``held`` was fetched before, ``linked`` lies in the user's cache of the Hub on the same disk,
    and ``copied`` on another.
    """

    repo: str
    commit: str
    folder: str
    files: int
    size: int
    of: int  # bytes of the whole repository
    held: int
    linked: int
    copied: int
    free: int

    @property
    def left(self) -> int:
        """Return the bytes that come over the network."""
        return max(self.size - self.held - self.linked - self.copied, 0)


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


def finding_fields(found: Finding) -> SentFinding:
    return SentFinding(
        level=found.level,
        where=found.where,
        what=found.what,
        why=found.why,
        kind=found.kind.__name__,
    )


def read_answer(kind: type[T], value: object) -> T:
    """Return what a node answered. Raises HostError if it is something else."""
    try:
        if kind is ModelCheck and isinstance(value, dict):
            value = {key: each for key, each in value.items() if key != "complete"}
        return record(kind, value)
    except RecordError as error:
        raise HostError(
            f"an odd answer of a node: {error}", hint="install patchkit again here"
        ) from None


def followed(
    answers: Iterator[Any],
    progress: Callable[[int, int], None],
    plan: Callable[[Any], None] | None = None,
) -> Any:
    """Return the ``result`` of a node's answers; hand over its progress, and its plan."""
    result = None
    for each in answers:
        if not isinstance(each, dict):
            continue
        if isinstance(each.get("done"), int) and isinstance(each.get("total"), int):
            progress(each["done"], each["total"])
        elif plan and "plan" in each:
            plan(each["plan"])
        elif "result" in each:
            result = each["result"]
    return result
