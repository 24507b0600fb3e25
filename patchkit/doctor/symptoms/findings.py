"""Turn the diagnoses of a log into findings: the first cause first, then its consequences."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from patchkit.cluster.agent.node_state import NodeLine
from patchkit.doctor.symptoms.diagnosis import Diagnosis, ReadLog, read_log
from patchkit.doctor.symptoms.lines import LONGEST, LogLine, log_line
from patchkit.doctor.symptoms.messages import (
    WORDS,
    flag_lifetime,
    last_frame,
    names_lever,
    option_advice,
    other_reasons,
    own_advice,
    states_cause,
    void_advice,
)
from patchkit.doctor.symptoms.scan import BEFORE, Hit
from patchkit.doctor.symptoms.symptom import Cause, symptoms
from patchkit.errors import HostError
from patchkit.finding import Finding, Findings, Level, worst
from patchkit.runtime.rules.rule import Situation, describe_condition

_SHOWN = 500  # characters of a text in a finding
_BEHIND = 2  # lines after an unknown error that its finding shows
_REQUEST = "request-error"
_UNFINISHED = "start-unfinished"
_LINE = 160  # characters of a line that a remark shows
_LAST_STEP = "The last step before it: {}"
_ENDINGS = {
    True: (
        Level.WARNING,
        "the start was ended from outside: by hand, a time limit, or what supervises it",
        "Look for who ended it: a limit for the start, a health check, a closed session.\n",
    ),
    False: (Level.NOTE, "the start has no end in this log", ""),
}
"""Whether a start was ended from outside → level, text, and the first line of the hint."""
_FOREIGN_BUILD = (
    "This vLLM is no release of upstream's (+{}): it may lack what the release of its "
    "number has, and its maker's issues come first."
)
_LIKELY = "likely, but the log does not prove it:"
_MAY_FOLLOW = "this may follow from the error above; if it does not:"
_REPORT = "look at the lines before it: `patchkit logs`, or those of the file"


def log_findings(
    log: ReadLog,
    where: str = "",
    nodes: Sequence[str] = (),
) -> Findings:
    """Yield the findings of a log.

    For a file, ``where`` is its name, and findings have numbers of lines. For journals, ``nodes``
    has the node of each line, from line 1 on; the findings name the node instead of a line.
    """
    for finding in _all_findings(log):
        if nodes and finding.line:
            yield replace(finding, where=nodes[finding.line - 1], line=0)
        else:
            yield replace(finding, where=where)


def _all_findings(log: ReadLog) -> list[Finding]:
    """Return the findings of errors and their consequences, then those about the whole log."""
    findings = [_unknown_error(log, log.strange)] if log.strange else []

    consequences = _consequences(log)
    for diagnosis in log.diagnoses:
        finding = diagnosis_finding(diagnosis)
        if diagnosis in consequences:
            finding = replace(finding, level=Level.NOTE)
        findings.append(finding)

    if worst(findings[:1], Level.ERROR, Level.WARNING):
        first, *others = findings
        findings = [
            _with_remarks(first, consequences, log),
            *map(_after_another, others),
        ]

    if log.ended and not log.serving:
        findings = _ended_findings(findings, log)

    if log.request:
        request = _unknown_error(log, log.request)
        what = f"a request failed, and the server goes on: {request.what}"
        request = replace(
            request,
            level=Level.WARNING if log.broken else Level.NOTE,
            about=_REQUEST,
            what=what,
        )
        findings.append(_with_levers(request, log))

    findings = [_without_void_advice(finding, log) for finding in findings]
    is_well = not worst(findings, Level.ERROR, Level.WARNING)
    return [*findings, *_whole_log(log, is_well)]


def _after_another(finding: Finding) -> Finding:
    """Return a later finding of a log as not decided: the first one may have caused it."""
    if finding.level not in (Level.ERROR, Level.WARNING):
        return finding

    why = f"{_MAY_FOLLOW}\n{finding.why}"
    return replace(finding, why=why, sure="not decided")


def _ended_findings(findings: list[Finding], log: ReadLog) -> list[Finding]:
    """Return the findings of a start that was ended from outside: later errors become notes.

    If an error came before the end, it may be the reason, and nothing changes.
    """
    before = [finding for finding in findings if finding.line < log.ended]
    if worst(before, Level.ERROR, Level.WARNING):
        return findings

    return [*_unfinished(log), *(replace(row, level=Level.NOTE) for row in findings)]


def _with_remarks(
    finding: Finding,
    consequences: Sequence[Diagnosis],
    log: ReadLog,
) -> Finding:
    """Return the first finding of a log with its consequences, the step before it, the build."""
    remarks = [finding.why]
    hints = [finding.hint]
    if step := log.step_before(finding.line):
        text, cure = step
        remarks.append(_LAST_STEP.format(text.strip()[:_LINE]))
        symptom = symptoms().get(finding.about)
        if symptom and symptom.silent:
            hints.append(cure)

    if build := log.facts.get("vllm_build"):
        remarks.append(_FOREIGN_BUILD.format(build))

    if consequences:
        ids = ", ".join(diagnosis.symptom.id for diagnosis in consequences)
        remarks.append(f"consequences: {ids}; -v")

    why = "\n".join(remarks).lstrip()
    return _with_levers(replace(finding, why=why, hint="\n".join(hints)), log)


def _with_levers(finding: Finding, log: ReadLog) -> Finding:
    """Return a finding; one that is not decided also says what to leave out as a test."""
    if "not decided" not in finding.sure or not log.levers:
        return finding

    levers = WORDS["levers"].format(levers="; ".join(log.levers))
    return replace(finding, hint=f"{finding.hint}\n{levers}")


def _without_void_advice(finding: Finding, log: ReadLog) -> Finding:
    """Return a finding that says which flags of its hint do not help in this log."""
    void = void_advice(finding.hint, log.options, log.facts.get("vllm", ""))
    return replace(finding, hint=f"{finding.hint}\n{void}".rstrip())


def _whole_log(log: ReadLog, is_well: bool) -> Findings:
    """Yield the findings about the whole log; ``is_well``: none is an error or a warning."""
    if log.earlier:
        yield Finding(
            level=Level.NOTE,
            about="earlier-start",
            line=log.earlier.number,
            what=f"an earlier start failed, the last of {log.begun} is judged: "
            f"{_shorten(log.earlier.text)}",
        )

    if log.unread:
        yield Finding(
            level=Level.UNKNOWN,
            about="log",
            what=f"not looked at: {log.unread}",
        )
    elif log.serving and is_well:
        yield _nothing_fatal(log)
    elif is_well:
        yield from _unfinished(log)


def is_answer(finding: Finding) -> bool:
    """Return whether a note, or that nothing is fatal, is shown in full without -v."""
    symptom = symptoms().get(finding.about)
    is_told = symptom and (symptom.answers or (symptom.request and not symptom.follows))
    is_whole = finding.about in (_REQUEST, _UNFINISHED, "log")
    return finding.level in (Level.NOTE, Level.OK) and bool(is_told or is_whole)


def _consequences(log: ReadLog) -> list[Diagnosis]:
    """Return the errors that follow from another error of the log.

    If every error may be a consequence, the first one counts as the cause. An error whose text is
    part of the first error's text repeats that one, and counts as a consequence.
    """
    errors = [diagnosis for diagnosis in log.diagnoses if diagnosis.level == "error"]
    consequences = [diagnosis for diagnosis in errors if not diagnosis.is_root]
    if log.strange:
        return consequences

    if len(consequences) == len(errors):
        return consequences[1:]

    first_text = errors[0].hit.text
    repeats = [row for row in errors[1:] if row.is_root and row.hit.text in first_text]
    return consequences + repeats


def _unknown_error(log: ReadLog, hit: Hit) -> Finding:
    """Return the finding of an error that no symptom describes.

    It shows the lines of the same writer around the error, and the function of the deepest frame.
    """
    last_line = hit.number + hit.text.count("\n")
    numbered = [log_line(number, text) for number, text in log.lines.items()]
    near = [
        line
        for line in numbered
        if hit.number - BEFORE <= line.number <= last_line + _BEHIND
        and line.who == hit.who
        and line.text.strip()
    ]
    shown = ["its lines:", *(line.text.strip()[:_SHOWN] for line in near)]

    # A message goes on in lines that are indented.
    behind = [
        line.text
        for line in near
        if line.number > last_line and line.text.startswith((" ", "hint:"))
    ]
    message = "\n".join([hit.text, *behind])

    family = log.family[hit.number]
    kind = _error_kind(message, family)
    names_nothing = kind == "own-words" and not names_lever(message, log.options)
    words = WORDS["kind"]["stated" if names_nothing else kind]

    hints = [own_advice(message)[:_SHOWN], option_advice(hit.text, log.options)]
    hints += [cause.cure for cause in family]
    hints += [f"`{cause.command}`" for cause in family if cause.command]
    if not any(hints):
        hints.append(words.get("cure", ""))

    shown += [cause.cause for cause in family]
    return Finding(
        kind=HostError,
        about=kind,
        line=hit.number,
        what=f"{words['title']}: {_shorten(message)}{_place(hit, near)}",
        why="\n".join(shown),
        hint="\n".join(filter(None, [*hints, _REPORT])),
        sure=words["sure"],
    )


def _error_kind(message: str, family: Sequence[Cause]) -> str:
    """Return which entry ``kind`` of messages.toml an unknown error is."""
    if states_cause(message):
        return "own-words"

    return next((row.id for row in family if row.id in WORDS["kind"]), "unknown")


def _place(exception: Hit, lines: Sequence[LogLine]) -> str:
    """Return " in FUNCTION (FILE)" for an exception without a message, "" for others."""
    if " " in exception.text:
        return ""

    frame = last_frame("\n".join(line.text for line in lines))
    return f" in {frame['function']} ({frame['file']})" if frame else ""


def _nothing_fatal(log: ReadLog) -> Finding:
    stopped = f", stopped in order at line {log.stopped}" if log.stopped else ""
    return Finding(
        level=Level.OK,
        about="log",
        line=log.serving,
        what=f"nothing fatal; serving since line {log.serving}{stopped}",
        hint="" if log.stopped else WORDS["well"],
    )


def _unfinished(log: ReadLog) -> Findings:
    """Yield the finding of a start without an error that does not come to its end in the log."""
    step = log.step_before(log.ended or float("inf"))
    if step is None:
        return

    text, cure = step
    level, what, sender = _ENDINGS[log.ended > 0]
    yield Finding(
        level=level,
        about=_UNFINISHED,
        line=log.ended,
        what=what,
        why=_LAST_STEP.format(text.strip()[:_LINE]),
        hint=sender + cure,
        sure="not decided",
    )


def _shorten(text: str) -> str:
    return " ".join(text.split())[:_SHOWN]


def diagnosis_finding(diagnosis: Diagnosis) -> Finding:
    """Return the finding of a symptom, with its cause.

    If several causes are possible, the finding has all of them, and commands that tell which
    one it is.
    """
    symptom = diagnosis.symptom

    was_bad = diagnosis.outlived and symptom.level != "note"
    outlived = ", which the server outlived" if was_bad else ""

    title = f"{diagnosis.filled(symptom.title)}{outlived}"
    finding = Finding(
        kind=HostError,
        level=Level(diagnosis.level),
        about=symptom.id,
        line=diagnosis.hit.number,
        what=f"{title}: {_shorten(diagnosis.hit.text)}",
        sure="not decided",
    )
    if not diagnosis.decided:
        return _with_candidates(finding, diagnosis)

    cause = diagnosis.causes[0]

    why = [
        diagnosis.filled(cause.cause),
        other_reasons(diagnosis.hit.text),
        flag_lifetime(diagnosis.hit.text),
    ]
    cure = (
        diagnosis.filled(cause.cure),
        diagnosis.pasted(cause.command),
        own_advice(diagnosis.hit.text)[:_SHOWN]
        if symptom.general or symptom.follows
        else "",
    )

    sure = f"{cause.confidence}, {cause.evidence}"
    if symptom.follows:
        # Its cause is in another error: the confidence would mislead.
        sure = finding.sure
    elif not diagnosis.is_claimed:
        sure = f"not decided; {sure}"
        why.insert(0, _LIKELY)

    return replace(
        finding,
        sure=sure,
        why="\n".join(filter(None, why)),
        hint="\n".join(filter(None, cure)),
        source=cause.source,
        holds=describe_condition(cause.when),
        costs=cause.costs,
    )


def _with_candidates(finding: Finding, diagnosis: Diagnosis) -> Finding:
    if not diagnosis.causes:
        return replace(finding, why="none of the causes that are known holds here")

    causes = ["one of these, the likeliest first:"]
    cures = []
    for candidate in diagnosis.causes:
        tell = diagnosis.pasted(candidate.tell)
        cure = diagnosis.filled(candidate.cure)
        causes.append(f"- {diagnosis.filled(candidate.cause)}")
        cures.append(f"- {tell} tells; then: {cure}" if tell else f"- {cure}")

    return replace(
        finding,
        why="\n".join(causes),
        hint="\n".join(cures),
    )


# Journals of several nodes


def read_journals(
    lines: Iterable[NodeLine],
    cluster_facts: Situation,
) -> tuple[ReadLog, Sequence[str]]:
    """Return the diagnoses of several nodes' journals, and the node of each line, from line 1 on.

    Raise HostError if grep does not run.
    """

    nodes = []
    written = []
    for node, line in lines:
        nodes.append(node)

        text = " ".join(line.text.splitlines()).encode(errors="replace")

        # The prefix names the writer: a node by the index of its first line. The text is cut,
        # since `scan` splits a long line in two, and the numbers of lines would be wrong.
        writer = nodes.index(node)
        written.append(b"node%d | %s\n" % (writer, text[: LONGEST // 2]))

    return read_log(written, cluster_facts), nodes


def explain_failed_start(
    lines: Iterable[NodeLine],
    ending: str,
) -> HostError:
    """Return the error of a failed start: the first line of all ranks that says why it failed.

    The error has the cause and the cure as far as the log shows them. ``ending`` is how the start
    ended. Raise HostError if grep does not run.
    """
    log, nodes = read_journals(lines, {})
    if log.lead is None:
        return HostError(f"the model did not start: {ending}", hint="patchkit logs")

    first = log.first
    finding = diagnosis_finding(first) if first else _unknown_error(log, log.lead)
    return HostError(
        f"{nodes[log.lead.number - 1]}: {log.lead.text.strip()}",
        why=f"{finding.why} ({finding.sure}); {ending}",
        hint=finding.hint.replace("\n", " "),
    )
