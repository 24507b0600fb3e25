"""Ask the model of a cluster what it should know, judge its answers, and keep them."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from types import NoneType

from patchkit.cluster.agent.fingerprint import keep_fingerprint
from patchkit.cluster.launch.cluster import Cluster, read_group_journal
from patchkit.cluster.openai.server_answers import ModelAnswers, ask_model
from patchkit.cluster.ssh.ssh import unchecked
from patchkit.doctor.answers import (
    TEXTS,
    AnswerCase,
    answer_findings,
    choose_former,
    fingerprint,
)
from patchkit.errors import PatchkitError
from patchkit.finding import Finding, finding_from_text
from patchkit.quoting import quoted

_LINES = 5000  # of each node's journal: more than a start writes


def check_answers(
    cluster: Cluster,
    *,
    port: int = 0,
    accept: bool = False,
) -> Sequence[Finding]:
    """Return the findings about the answers of a cluster's model, and keep the answers.

    The server is at ``port``; for 0 where `up` started it, or else at the default port. ``accept``
    takes the answers for right, whatever the model answered before. A server that cannot be asked
    is a finding.
    """
    head = cluster.head
    try:
        answers = head.call(
            ModelAnswers,
            ask_model,
            url=f"http://127.0.0.1:{port or cluster.serve.port}",
            cluster=cluster.name,
            is_named=port > 0,
        )
    except PatchkitError as error:
        return [unchecked("answers", head.destination, error.what, error.hint)]

    case = AnswerCase(
        answers=answers,
        former=None if accept else choose_former(answers),
        again=again_command(cluster, port),
        log=_read_log(cluster) if answers.start.cluster else (),
    )
    findings = answer_findings(head.destination, case)
    kept = fingerprint(case, findings, time.time())
    try:
        head.call(NoneType, keep_fingerprint, fingerprint=kept)
    except (PatchkitError, OSError) as error:
        where = head.destination
        unkept = finding_from_text(TEXTS, "answers-unkept", where, refusal=error)
        findings.append(unkept)
    return findings


def again_command(cluster: Cluster, port: int = 0) -> str:
    """Return the command that asks the model of a cluster again."""
    options = ("--port", str(port)) if port else cluster.doctor_options
    return quoted("patchkit", "doctor", "--answers", *options)


def _read_log(cluster: Cluster) -> Iterator[str]:
    with contextlib.suppress(PatchkitError):
        for _node, line in read_group_journal(cluster, lines=_LINES).lines:
            yield line.text
