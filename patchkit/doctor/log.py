"""Turn what a log says into findings: the first cause first, then what followed from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from patchkit.doctor.symptoms.diagnosis import Diagnosis, ReadLog
from patchkit.doctor.symptoms.lines import log_line
from patchkit.doctor.symptoms.scan import BEFORE, Hit
from patchkit.doctor.symptoms.symptom import Cause
from patchkit.errors import HostError
from patchkit.finding import Finding, Level
from patchkit.runtime.rules.condition import in_words

_SHOWN = 300  # characters of a text that was found
_BEHIND = 2  # lines behind an error that nobody knows
_REPORT = (
    "look at the lines before it; the same command with `--save report.tar.gz` packs them for a "
    "report"
)
_UNKNOWN = "none of the causes that are known holds here"


def log_findings(log: ReadLog, where: str = "", nodes: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield what a log says is wrong.

    ``where`` is the file, whose lines have numbers; or ``nodes`` are the writers of each line.
    """

    def place(line: int) -> tuple[str, int]:
        return (nodes[line - 1], 0) if nodes else (where, line)

    errors = [diagnosis for diagnosis in log.diagnoses if diagnosis.level == "error"]
    caused = [diagnosis for diagnosis in errors if not diagnosis.is_root]
    if not log.strange and len(caused) == len(errors):
        caused = caused[1:]
    found = (
        [_unknown_error(log.strange, log.lines, *place(log.strange.number))] if log.strange else []
    )
    for diagnosis in log.diagnoses:
        finding = diagnosis_finding(diagnosis, *place(diagnosis.hit.number))
        found.append(replace(finding, level=Level.NOTE) if diagnosis in caused else finding)
    if caused:
        ids = ", ".join(diagnosis.symptom.id for diagnosis in caused)
        plural = "s" * (len(caused) > 1)
        why = f"{found[0].why}\n{len(caused)} consequence{plural}: {ids}; -v".lstrip()
        found[0] = replace(found[0], why=why)
    yield from found
    if log.earlier:
        node, line = place(log.earlier.number)
        shown = _shorten_hit(log.earlier)
        what = f"an earlier start failed, the last of {log.begun} is judged: {shown}"
        yield Finding(level=Level.NOTE, where=node, line=line, about="earlier-start", what=what)
    if (
        log.serving
        and not log.unread
        and all(each.level not in (Level.ERROR, Level.WARNING) for each in found)
    ):
        node, line = place(log.serving)
        stopped = f", stopped in order at line {log.stopped}" if log.stopped else ""
        what = f"nothing fatal; serving since line {log.serving}{stopped}"
        yield Finding(level=Level.OK, where=node, line=line, about="log", what=what)
    if log.unread:
        yield Finding(
            level=Level.UNKNOWN, where=where, about="log", what=f"not looked at: {log.unread}"
        )


def _unknown_error(hit: Hit, lines: Mapping[int, str], where: str, line: int) -> Finding:
    """Return an error that nobody knows, with the lines of its writer around it."""
    near = (log_line(number, text) for number, text in lines.items())
    last = hit.number + hit.text.count("\n") + _BEHIND
    own = (
        other.text.strip()[:_SHOWN]
        for other in near
        if hit.number - BEFORE <= other.number <= last and other.who == hit.who
    )
    return Finding(
        kind=HostError,
        where=where,
        line=line,
        about="unknown",
        what=f"an error that patchkit does not know: {_shorten_hit(hit)}",
        why="\n".join(["its lines:", *filter(None, own)]),
        hint=_REPORT,
        sure="not decided",
    )


def _shorten_hit(hit: Hit) -> str:
    return " ".join(hit.text.split())[:_SHOWN]


def diagnosis_finding(diagnosis: Diagnosis, where: str, line: int) -> Finding:
    """Return a symptom as a finding: its cause, or the candidates and what tells them apart."""
    symptom = diagnosis.symptom
    times = f" ({diagnosis.count} times)" if diagnosis.count > 1 else ""
    outlived = ", which the server outlived" if diagnosis.outlived else ""
    cause = diagnosis.causes[0] if diagnosis.decided else None
    # What points elsewhere is sure of nothing.
    sure = f"{cause.confidence}, {cause.evidence}" if cause and not symptom.follows else ""
    return Finding(
        kind=HostError,
        level=Level(diagnosis.level),
        where=where,
        line=line,
        about=symptom.id,
        what=f"{diagnosis.filled(symptom.title)}{outlived}{times}: {_shorten_hit(diagnosis.hit)}",
        why=diagnosis.filled(cause.cause) if cause else _list_candidates(diagnosis),
        hint=_write_cure(diagnosis, cause) if cause else _list_tells(diagnosis),
        source=cause.source if cause else "",
        sure=sure or "not decided",
        holds=in_words(cause.when) if cause else "",
        costs=cause.costs if cause else "",
    )


def _write_cure(diagnosis: Diagnosis, cause: Cause) -> str:
    lines = (diagnosis.filled(cause.cure), diagnosis.pasted(cause.command))
    return "\n".join(filter(None, lines))


def _list_candidates(diagnosis: Diagnosis) -> str:
    if not diagnosis.causes:
        return _UNKNOWN
    causes = (f"- {diagnosis.filled(each.cause)}" for each in diagnosis.causes)
    return "\n".join(["one of these, the likeliest first:", *causes])


def _list_tells(diagnosis: Diagnosis) -> str:
    """Return what would decide, and the cure of each candidate."""
    lines = []
    for each in diagnosis.causes:
        tell = diagnosis.pasted(each.tell)
        cure = diagnosis.filled(each.cure)
        lines.append(f"- {tell} tells; then: {cure}" if tell else f"- {cure}")
    return "\n".join(lines)
