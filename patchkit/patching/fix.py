"""Define a fix: metadata, the releases that need it, and the function that looks at the code."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import field
from functools import partial
from typing import Annotated, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from patchkit.digests import digest
from patchkit.edit.splice import Edit
from patchkit.finding import Established
from patchkit.frozen import Texts, Values, frozen, positional
from patchkit.records import RecordError, Sha256, Utf8, matching, record
from patchkit.source.tree import SourceTree
from patchkit.target import Target

Id = Annotated[Utf8, matching(r"[a-z0-9][a-z0-9_-]{0,99}", "an id")]
Mode = Literal["native", "family"]
Layer = Literal["python", "build"]


class State(enum.StrEnum):
    """State of a fix in a tree: it is to be applied, or the reason why it is not."""

    APPLY = "apply"
    APPLIED = "applied"
    UPSTREAM = "upstream"
    NOT_APPLICABLE = "not-applicable"
    OFF = "off"
    DRIFTED = "drifted"


class Severity(enum.StrEnum):
    """How much a release depends on a fix; an optional fix is off unless the user turns it on."""

    REQUIRED = "required"
    RECOMMENDED = "recommended"
    OPTIONAL = "optional"


@positional
class Need:
    """Releases that need a fix (a PEP 440 specifier), and why.

    ``arch`` limits the need to one arch mode, ``kind`` to "source" trees or "installed" packages,
    ``target`` to one device.
    """

    versions: str
    reason: str
    severity: Severity
    arch: Literal["", Mode] = ""
    kind: Literal["", "source", "installed"] = ""
    target: str = ""

    def __post_init__(self) -> None:
        SpecifierSet(self.versions)  # raises ValueError

    @property
    def limits(self) -> str:
        """Limits in words, such as "--arch native, installed, gb10"; "" without limits."""
        arch = f"--arch {self.arch}" if self.arch else ""
        return ", ".join(filter(None, (arch, self.kind, self.target)))

    @property
    def begins(self) -> list[Version]:
        """Lower ends of the range (of ``>=`` and ``==``); empty if it has none."""
        specs = SpecifierSet(self.versions)
        return [
            Version(spec.version) for spec in specs if spec.operator in (">=", "==")
        ]

    def covers(self, version: Version) -> bool:
        """Return whether a release needs the fix. A pre-release counts as its release."""
        return SpecifierSet(self.versions).contains(version.base_version)


required = partial(Need, severity=Severity.REQUIRED)  # releases fail without the fix
recommended = partial(Need, severity=Severity.RECOMMENDED)  # they work better with it
optional = partial(Need, severity=Severity.OPTIONAL)  # off unless the user turns it on


@positional
class Evidence:
    """A claim, its source, and how it was established."""

    claim: str
    source: str
    established: Established

    def __post_init__(self) -> None:
        record(list[Established], [self.established])  # raises RecordError


@frozen
class Patch:
    """A patch of the user: a unified diff, identified by its sha256."""

    id: Id
    title: Utf8
    sha256: Sha256
    text: Utf8

    def __post_init__(self) -> None:
        if digest(self.text) != self.sha256:
            raise RecordError("has another sha256 than its text")


@frozen
class Request:
    """A user's request: target, arch mode, selected fixes, and patches in order.

    ``only``, ``skip`` and ``also`` are the fix ids of --only, --without and --with.
    """

    target: Target
    arch: str = "native"  # or "family"
    only: frozenset[str] = frozenset()
    skip: frozenset[str] = frozenset()
    also: frozenset[str] = frozenset()
    patches: tuple[Patch, ...] = ()

    @property
    def arch_list(self) -> str:
        return self.target.arch_list(self.arch)

    @property
    def patch_facts(self) -> dict[str, object]:
        """Facts about the patches for the manifest of a wheel; empty without patches."""
        if not self.patches:
            return {}

        facts = [
            {"id": patch.id, "title": patch.title, "sha256": patch.sha256}
            for patch in self.patches
        ]
        return {"patches": facts}


@positional
class Observation:
    """What a fix sees in the code: ``state`` is APPLY (with edits), APPLIED or UPSTREAM.

    ``reason`` describes the code as it is, ``done`` the code after the edits.
    """

    state: State
    reason: str
    edits: tuple[Edit, ...] = ()
    done: str = ""
    note: str = ""


def found(edits: Sequence[Edit], *, now: str, done: str) -> Observation:
    """Return APPLY with the edits and the reason ``now``; without edits, APPLIED with ``done``."""
    if not edits:
        return Observation(State.APPLIED, done)

    return Observation(State.APPLY, now, tuple(edits), done)


def places(paths: Sequence[str]) -> str:
    """Return the first path and the number of the others, ``a.py (+2 more)``; "" for no path."""
    if len(paths) > 1:
        return f"{paths[0]} (+{len(paths) - 1} more)"
    return "".join(paths)


def upstream(reason: str) -> Observation:
    """Return UPSTREAM: the release has the change already."""
    return Observation(State.UPSTREAM, reason)


@positional
class Example:
    """One file of one release before and after a fix, for tests and documentation.

    ``before`` is None for a file that the fix creates.
    """

    version: str
    path: str
    before: str | None
    after: str
    arch: str = "native"
    # Further files that the fix looks at.
    beside: Values = field(default_factory=dict)


@frozen
class Case:
    """Input of a proof: a tree before and after the fixes, and the ids of the fixes in effect.

    ``stock`` is the tree with the edits of the earlier fixes, or with no edits for a fix with
    ``prove_from_stock``. ``patched`` is the tree with the edits of all fixes.
    """

    stock: SourceTree
    patched: SourceTree
    request: Request
    active: frozenset[str]


Look = Callable[[SourceTree, Request], Observation]
Proof = Callable[[Case], str]


@frozen
class Fix:
    """One change of upstream's code, and the releases that need it.

    ``look`` reads the code and decides; ``needs`` only says which releases are candidates.
    ``prove`` returns a sentence about what it has proved, or raises ProofError. Both may run
    upstream's code only through ``proof.questions``. Without an ``id``, the name of the file is it.
    """

    id: str = ""
    title: str
    symptom: str
    why: str
    needs: tuple[Need, ...]
    upstream: str
    look: Look
    evidence: tuple[Evidence, ...] = ()
    layer: Layer = "python"  # or "build": only trees that are compiled
    majors: tuple[int, ...] = (12,)  # of the compute capability: 12.0, 12.1 …
    requires: Texts = ()
    prove: Proof | None = None
    prove_upstream: bool = False  # prove also where upstream has the change
    last: bool = False  # apply after all others and the user's patches
    prove_from_stock: bool = False  # compare with the tree without any edits
    examples: tuple[Example, ...] = ()

    def __post_init__(self) -> None:
        record(list[Layer], [self.layer])  # raises RecordError

    def need(self, version: Version, arch: str, kind: str = "source") -> Need | None:
        """Return the first need that covers a release in an arch mode and kind of tree, or None."""
        for need in self.needs_of(arch, kind):
            if need.covers(version):
                return need
        return None

    def needs_of(self, arch: str, kind: str = "source") -> list[Need]:
        """Return the needs that apply to an arch mode and a kind of tree."""
        allowed = {"", arch, kind}
        return [need for need in self.needs if {need.arch, need.kind} <= allowed]


@positional
class Verdict:
    """Verdict about a fix in a tree: its state, the reason, and the edits to make.

    ``done`` is the reason after the edits are made.
    """

    fix: Fix
    state: State
    reason: str
    edits: tuple[Edit, ...] = ()
    severity: Severity | None = None
    note: str = ""
    done: str = ""
