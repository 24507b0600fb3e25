"""Describe the result of a check, and how something is known: one vocabulary for all rooms.

The texts of the doctor's findings are data, in recipes/doctor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from enum import StrEnum
from functools import cache
from typing import Literal

from patchkit.errors import HostError, PatchkitError, SourceError
from patchkit.frozen import frozen
from patchkit.records import RECIPES, read_toml

# How a fact is known, not how likely it is: "measured" is only for what somebody ran.
Established = Literal[
    "measured",  # somebody ran it, and results or figures are there
    "compiled",  # a compiler took or refused it
    "read",  # it stands in the source code
    "documented",  # its maker says so
    "reported",  # several users say so
    "single report",  # one user says so
    "inferred",  # it follows from something else that is known
]
SINGLE_REPORT: Established = "single report"

Confidence = Literal["high", "medium", "contested"]
"""How sure a rule is; contested where sources contradict each other."""


class Level(StrEnum):
    """How bad a finding is. A check that could not be made is unknown, and not passed."""

    ERROR = "error"  # it does not work, or does not do what it says
    WARNING = "warning"  # it is likely harmful
    NOTE = "note"  # it has no effect, or is worth knowing
    UNKNOWN = "unknown"
    OK = "ok"


@frozen
class Finding:
    """The result of one check.

    ``id`` is its stable name. ``where`` is the file, interface, address or pair, with ``line`` in a
    file; ``about`` is the variable, the rule or the check. ``what`` says how it is, ``why`` says
    why that matters, ``hint`` what to do, ``source`` who says so. ``kind`` is the error for a
    finding of level ERROR; its exit code ends the command. ``sure`` says how the cause is known,
    ``holds`` for which versions and machines, ``costs`` what the cure costs.
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
        """Return the finding as the error that ends a command."""
        return self.kind(self.what, why=self.why, hint=self.hint)

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
    """Return the highest exit code of the findings of these levels (ERROR alone), 0 for none."""
    counted = levels or (Level.ERROR,)
    codes = [finding.kind.exit_code for finding in findings if finding.level in counted]
    return max(codes, default=0)


@frozen
class FindingText:
    """A finding as a file has it; ``{fields}`` of its texts are filled in.

    ``fine`` is the text of a check that passed; ``run`` are the words of {command}. ``covers`` are
    checks of one machine, or of two, that say the same less exactly.
    """

    id: str
    level: Level
    says: str
    why: str
    hint: str
    source: str
    fine: str = ""
    run: tuple[str, ...] = ()
    covers: tuple[str, ...] = ()


@cache
def finding_texts(file: str) -> Mapping[str, FindingText]:
    """Return the texts of a file of recipes/doctor by id, in its order."""
    texts = read_toml(tuple[FindingText, ...], RECIPES / "doctor" / file, key="finding")
    return {text.id: text for text in texts}


def finding_from_text(file: str, about: str, where: str, **fields: object) -> Finding:
    """Return a finding of a file of recipes/doctor; ``where`` is the node or the log."""
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
