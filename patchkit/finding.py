"""Define findings, the results of checks, and the words for how a fact is known.

All rooms use these types. The texts of the doctor's findings are data, in recipes/doctor.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from enum import StrEnum
from functools import cache
from typing import Literal

from patchkit.errors import HostError, PatchkitError, SourceError
from patchkit.frozen import Fields, Texts, Values, frozen
from patchkit.records import RECIPES, read_toml

# How a fact is known, not how likely it is: "measured" is only for what somebody ran.
Established = Literal[
    "measured",  # somebody ran it, and has results or figures
    "compiled",  # a compiler took or refused it
    "read",  # it stands in the source code
    "documented",  # its maker says so
    "reported",  # several users say so
    "single report",  # one user says so
    "inferred",  # it follows from something else that is known
]
_TEXTS = ("what", "why", "hint", "source")

SINGLE_REPORT: Established = "single report"

Confidence = Literal["high", "medium", "contested"]
"""How sure a rule is; ``contested`` means that sources contradict each other."""


class Level(StrEnum):
    """How bad a finding is. A check that could not be made is UNKNOWN, not OK."""

    ERROR = "error"  # it does not work, or does not do what it says
    WARNING = "warning"  # it is likely harmful
    NOTE = "note"  # it has no effect, or is worth knowing
    UNKNOWN = "unknown"
    OK = "ok"


@frozen
class Finding:
    """The result of one check.

    ``id`` is its stable name. ``where`` is the file, interface, address or pair of nodes that it
    was made for, ``line`` the line in a file, ``about`` the variable, the rule or the check.
    ``what`` describes the state, ``why`` says why that matters, ``hint`` what to do, and ``source``
    where the statement comes from. ``kind`` is the type of error whose exit code a command ends
    with if the level is ERROR. ``sure`` says how the cause is known, ``holds`` for which versions
    and machines, ``costs`` what the cure costs.
    """

    what: str
    id: str = ""
    level: Level = Level.ERROR
    where: str = ""
    line: int = 0
    about: str = ""
    why: str = ""
    hint: str = ""
    source: str = ""
    sure: str = ""
    holds: str = ""
    costs: str = ""
    kind: type[PatchkitError] = SourceError

    def error(self) -> PatchkitError:
        """Return the finding as an error that a command can raise."""
        return self.kind(self.what, why=self.why, hint=self.hint)

    def located_error(self) -> PatchkitError:
        """Return the same error with ``where`` before its text."""
        return self.kind(f"{self.where}: {self.what}", why=self.why, hint=self.hint)

    def fields(self) -> dict[str, object]:
        """Return the finding as an object of JSON, without ``kind`` and an empty ``id``."""
        fields = asdict(self)
        del fields["kind"]
        if not self.id:
            del fields["id"]
        return fields


def finding(
    kind: type[PatchkitError],
    where: str,
    what: str,
    hint: str,
    why: str = "",
) -> Finding:
    """Return a finding of level ERROR about the file ``where``."""
    return Finding(kind=kind, where=where, what=what, hint=hint, why=why)


def worst(findings: Iterable[Finding], *levels: Level) -> int:
    """Return the highest exit code of the findings with these levels, 0 if there are none.

    Without ``levels``, only the level ERROR counts.
    """
    counted = levels or (Level.ERROR,)
    codes = [finding.kind.exit_code for finding in findings if finding.level in counted]
    return max(codes, default=0)


Findings = Iterator[Finding]


def fill_texts(row: Values, fields: Mapping[str, object]) -> Fields:
    """Return what, why, hint and source of a row of data, with ``fields`` filled in."""
    return {name: row[name].format_map(fields) for name in _TEXTS if name in row}


@frozen
class FindingText:
    """The texts of a finding in a file of recipes/doctor, with ``{fields}`` to be filled in.

    ``fine`` is the text for a check that passed. ``run`` are the words of the field {command}.
    ``covers`` are the ids of checks that say the same less exactly, and are left out then.
    """

    id: str
    level: Level
    says: str
    why: str
    hint: str
    source: str
    fine: str = ""
    run: Texts = ()
    covers: Texts = ()


@cache
def finding_texts(file: str) -> Mapping[str, FindingText]:
    """Return id → texts from a file of recipes/doctor, in the order of the file."""
    texts = read_toml(tuple[FindingText, ...], RECIPES / "doctor" / file, key="finding")
    return {text.id: text for text in texts}


def finding_from_text(file: str, about: str, where: str, **fields: object) -> Finding:
    """Return the finding with the id ``about`` from a file of recipes/doctor.

    ``where`` is the node or the log that it was made for; ``fields`` fill its texts.
    """
    text = finding_texts(file)[about]
    fields["where"] = where
    return Finding(
        kind=HostError,
        level=text.level,
        where=where,
        about=about,
        what=text.says.format_map(fields),
        why=text.why.format_map(fields),
        hint=text.hint.format_map(fields),
        source=text.source.format_map(fields),
    )
