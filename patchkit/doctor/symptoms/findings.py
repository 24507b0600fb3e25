"""Turn what a log says into findings: the first cause first, then what followed from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from patchkit.cluster.agent.unit_state import JournalLine
from patchkit.doctor.symptoms.diagnosis import Diagnosis, ReadLog, read_log
from patchkit.doctor.symptoms.lines import LONGEST, log_line
from patchkit.doctor.symptoms.scan import BEFORE, Hit
from patchkit.errors import HostError
from patchkit.finding import Finding, Level
from patchkit.runtime.rules.rule import Situation, in_words

_SHOWN = 300  # characters of a text that was found
_BEHIND = 2  # lines behind an error that nobody knows
_REPORT = "look at the lines before it; the same command with `--save report.tar.gz` keeps them"


def log_findings(
    log: ReadLog, where: str = "", nodes: Sequence[str] = ()
) -> Iterator[Finding]:
    """Yield what a log says is wrong.

    ``where`` is the file, whose lines have numbers; or ``nodes`` are the writers of each line.
    """
    errors = [diagnosis for diagnosis in log.diagnoses if diagnosis.level == "error"]
    caused = [diagnosis for diagnosis in errors if not diagnosis.is_root]
    if not log.strange and len(caused) == len(errors):
        caused = caused[1:]
    found = []
    if hit := log.strange:
        # The lines of its writer around it.
        last = hit.number + hit.text.count("\n") + _BEHIND
        near = (
            log_line(number, text)
            for number, text in log.lines.items()
            if hit.number - BEFORE <= number <= last
        )
        own = (line.text.strip()[:_SHOWN] for line in near if line.who == hit.who)
        unknown = Finding(
            kind=HostError,
            about="unknown",
            line=hit.number,
            what=f"an error that patchkit does not know: {_shorten_hit(hit)}",
            why="\n".join(["its lines:", *filter(None, own)]),
            hint=_REPORT,
            sure="not decided",
        )
        found.append(unknown)
    for diagnosis in log.diagnoses:
        finding = diagnosis_finding(diagnosis)
        found.append(
            replace(finding, level=Level.NOTE) if diagnosis in caused else finding
        )
    if caused:
        ids = ", ".join(diagnosis.symptom.id for diagnosis in caused)
        plural = "s" * (len(caused) > 1)
        why = f"{found[0].why}\n{len(caused)} consequence{plural}: {ids}; -v".lstrip()
        found[0] = replace(found[0], why=why)
    well = all(its.level not in (Level.ERROR, Level.WARNING) for its in found)
    if log.earlier:
        shown = _shorten_hit(log.earlier)
        what = f"an earlier start failed, the last of {log.begun} is judged: {shown}"
        line = log.earlier.number
        found.append(
            Finding(level=Level.NOTE, about="earlier-start", what=what, line=line)
        )
    if log.unread:
        what = f"not looked at: {log.unread}"
        found.append(Finding(level=Level.UNKNOWN, about="log", what=what))
    elif log.serving and well:
        stopped = f", stopped in order at line {log.stopped}" if log.stopped else ""
        what = f"nothing fatal; serving since line {log.serving}{stopped}"
        found.append(Finding(level=Level.OK, about="log", what=what, line=log.serving))
    for its in found:
        writer = nodes[its.line - 1] if nodes and its.line else ""
        yield replace(its, where=writer or where, line=0 if writer else its.line)


def _shorten_hit(hit: Hit) -> str:
    return " ".join(hit.text.split())[:_SHOWN]


def diagnosis_finding(diagnosis: Diagnosis) -> Finding:
    """Return a symptom as a finding: its cause, or the candidates and what tells them apart."""
    symptom, cause = (
        diagnosis.symptom,
        diagnosis.causes[0] if diagnosis.decided else None,
    )
    times = f" ({diagnosis.count} times)" if diagnosis.count > 1 else ""
    outlived = ", which the server outlived" if diagnosis.outlived else ""
    found = Finding(
        kind=HostError,
        level=Level(diagnosis.level),
        about=symptom.id,
        line=diagnosis.hit.number,
        what=f"{diagnosis.filled(symptom.title)}{outlived}{times}: {_shorten_hit(diagnosis.hit)}",
        sure="not decided",
    )
    if cause:
        lines = (diagnosis.filled(cause.cure), diagnosis.pasted(cause.command))
        return replace(
            found,
            why=diagnosis.filled(cause.cause),
            hint="\n".join(filter(None, lines)),
            source=cause.source,
            # What points elsewhere is sure of nothing.
            sure=found.sure
            if symptom.follows
            else f"{cause.confidence}, {cause.evidence}",
            holds=in_words(cause.when),
            costs=cause.costs,
        )
    whys, hints = ["one of these, the likeliest first:"], []
    for candidate in diagnosis.causes:
        tell, cure = diagnosis.pasted(candidate.tell), diagnosis.filled(candidate.cure)
        whys.append(f"- {diagnosis.filled(candidate.cause)}")
        hints.append(f"- {tell} tells; then: {cure}" if tell else f"- {cure}")
    why = "\n".join(whys) if hints else "none of the causes that are known holds here"
    return replace(found, why=why, hint="\n".join(hints))


# Journals of several nodes


def read_journals(
    lines: Iterable[tuple[str, JournalLine]], known: Situation
) -> tuple[ReadLog, Sequence[str]]:
    """Return what is known of what nodes wrote, and the node of each line: of line 1 the first.

    ``known`` are facts of the cluster. Raises HostError if grep does not run.
    """
    nodes, written = [], []
    for node, line in lines:
        nodes.append(node)
        text = " ".join(line.text.splitlines()).encode(errors="replace")
        # The writer is the first line's number of its node; a longer line would count as two.
        written.append(b"node%d | %s\n" % (nodes.index(node), text[: LONGEST // 2]))
    return read_log(written, known), nodes


def explain_failed_start(
    lines: Iterable[tuple[str, JournalLine]], how: str
) -> HostError:
    """Return the error of a start that failed: the first line of all ranks that says why.

    With what caused it and what cures it, if the text decides that. ``how`` is how it ended.
    """
    log, nodes = read_journals(lines, {})
    if log.lead is None:
        return HostError(f"the model did not start: {how}", hint="patchkit logs")
    what = f"{nodes[log.lead.number - 1]}: {log.lead.text.strip()}"
    known = log.first
    if known is None or not known.decided or known.symptom.follows:
        hint = "patchkit doctor --cluster" if known else "patchkit logs"
        return HostError(what, why=f"the first error of all ranks; {how}", hint=hint)
    found = diagnosis_finding(known)
    why = f"{found.why} ({known.causes[0].evidence}: {found.source}); {how}"
    return HostError(what, why=why, hint=found.hint.replace("\n", " "))
