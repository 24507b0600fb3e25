"""Find the line of several nodes' journals that says what went wrong, with its cause and cure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from patchkit.cluster.agent.journal import JournalLine
from patchkit.cluster.launch.start import FailedStart
from patchkit.doctor.symptoms.diagnosis import ReadLog, read_log
from patchkit.doctor.symptoms.lines import LONGEST
from patchkit.errors import HostError
from patchkit.runtime.rules.condition import Situation

_FATAL = re.compile(
    r"\b(?:[A-Z]\w*(?:Error|Exception)\b(?:: |$)|CUDA error|NCCL WARN|out of memory|Killed"
    r"|error: |fatal: |terminate called|Segmentation fault|ended before it had answered)"
)
# An error that tells of another one, which is what a person looks for.
_FOLLOWS = re.compile(
    r"Engine core init(?:ialization)? failed|See root cause above|EngineDeadError|WorkerProc init"
    r"|cancelled|Traceback"
)


def first_error(lines: Iterable[tuple[str, JournalLine]]) -> tuple[str, JournalLine] | None:
    """Return the first line that says what went wrong, and its node; None if none does."""
    second = None
    for node, line in lines:
        if not _FATAL.search(line.text):
            continue
        if not _FOLLOWS.search(line.text):
            return node, line
        second = second or (node, line)
    return second


def read_journals(
    lines: Iterable[tuple[str, JournalLine]], known: Situation
) -> tuple[ReadLog, Sequence[str]]:
    """Return what is known of what nodes wrote, and the node of each line: of line 1 the first.

    ``known`` are facts of the cluster. Raises HostError if grep does not run.
    """
    nodes: list[str] = []

    def written() -> Iterator[bytes]:
        for node, line in lines:
            nodes.append(node)
            text = " ".join(line.text.splitlines()).encode(errors="replace")
            # The node's number tells the writers apart; a longer line would count as two.
            yield b"node%d | %s\n" % (numbers.setdefault(node, len(numbers)), text[: LONGEST // 2])

    numbers: dict[str, int] = {}
    return read_log(written(), known), nodes


def explain_failed_start(start: FailedStart) -> HostError:
    """Return the error of a start that failed: the first line of all ranks that says why.

    With what caused it and what cures it, if the text decides that.
    """
    log, nodes = read_journals(start.lines, {"nodes": str(start.nodes)})
    known = log.first
    if known and known.decided and not known.symptom.follows:
        node, (cause,) = nodes[known.hit.number - 1], known.causes
        return HostError(
            f"{node}: {known.hit.text.strip()}",
            why=f"{known.filled(cause.cause)} ({cause.evidence}: {cause.source}); {start.how}",
            hint=" ".join(filter(None, (known.filled(cause.cure), known.pasted(cause.command)))),
        )
    first = first_error(start.lines)
    if first is None:
        return HostError(f"the model did not start: {start.how}", hint="patchkit logs")
    node, line = first
    return HostError(
        f"{node}: {line.text.strip()}",
        why=f"the first error of all ranks; {start.how}",
        hint="patchkit logs" if known is None else "patchkit doctor --cluster",
    )
