"""Turn what a log says into findings: the first cause first, then what followed from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from patchkit.errors import HostError
from patchkit.finding import Finding, Level
from patchkit.runtime.rules.condition import in_words
from patchkit.runtime.symptoms.diagnosis import Diagnosis, ReadLog
from patchkit.runtime.symptoms.scan import Hit
from patchkit.runtime.symptoms.symptom import Cause

_SHOWN = 300  # characters of a text that was found
_REPORT = (
    "look at the lines before it; `patchkit doctor --save report.tar.gz` packs them for a report"
)
_UNKNOWN = "none of the causes that are known holds here"


def log_findings(log: ReadLog, where: str = "", nodes: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield what a log says is wrong.

    ``where`` is the file, whose lines have numbers; or ``nodes`` are the writers of each line.
    """

    def place(hit: Hit) -> tuple[str, int]:
        return (nodes[hit.number - 1], 0) if nodes else (where, hit.number)

    for each in log.diagnoses:
        yield diagnosis_finding(each, *place(each.hit))
    if log.strange:
        text = " ".join(log.strange.text.split())[:_SHOWN]
        node, number = place(log.strange)
        yield Finding(
            kind=HostError,
            where=node,
            line=number,
            about="unknown",
            what=f"an error that patchkit does not know: {text}",
            hint=_REPORT,
            sure="not decided",
        )
    if log.unread:
        yield Finding(
            level=Level.UNKNOWN, where=where, about="log", what=f"not looked at: {log.unread}"
        )


def diagnosis_finding(diagnosis: Diagnosis, where: str, line: int) -> Finding:
    """Return a symptom as a finding: its cause, or the candidates and what tells them apart."""
    symptom, hit = diagnosis.symptom, diagnosis.hit
    times = f" ({diagnosis.count} times)" if diagnosis.count > 1 else ""
    shown = " ".join(hit.text.split())[:_SHOWN]
    cause = diagnosis.causes[0] if diagnosis.decided else None
    return Finding(
        kind=HostError,
        level=Level(symptom.level),
        where=where,
        line=line,
        about=symptom.id,
        what=f"{diagnosis.filled(symptom.title)}{times}: {shown}",
        why=diagnosis.filled(cause.cause) if cause else _candidates(diagnosis),
        hint=_cure(diagnosis, cause) if cause else _tells(diagnosis),
        source=cause.source if cause else "",
        sure=f"{cause.confidence}, {cause.evidence}" if cause else "not decided",
        holds=in_words(cause.when) if cause else "",
        costs=cause.costs if cause else "",
    )


def _cure(diagnosis: Diagnosis, cause: Cause) -> str:
    lines = (diagnosis.filled(cause.cure), diagnosis.pasted(cause.command))
    return "\n".join(filter(None, lines))


def _candidates(diagnosis: Diagnosis) -> str:
    if not diagnosis.causes:
        return _UNKNOWN
    causes = (f"- {diagnosis.filled(each.cause)}" for each in diagnosis.causes)
    return "\n".join(["one of these, the likeliest first:", *causes])


def _tells(diagnosis: Diagnosis) -> str:
    """Return what would decide, and the cure of each candidate."""
    lines = []
    for each in diagnosis.causes:
        tell = diagnosis.pasted(each.tell)
        cure = diagnosis.filled(each.cure)
        lines.append(f"- {tell} tells; then: {cure}" if tell else f"- {cure}")
    return "\n".join(lines)
