"""Judge the answers of a server: its health, its models, one token, and its load. Pure."""

from collections.abc import Iterator, Mapping, Sequence

from patchkit.cluster.agent.group_script import EMBEDDING, TokenAnswer
from patchkit.cluster.agent.node_state import UnitState
from patchkit.cluster.openai.server_answers import ServerAnswers
from patchkit.cluster.ssh.ssh import make_finding, ssh_command
from patchkit.finding import Findings
from patchkit.http_exchange import PathAnswer

_FULL = 0.95  # part of the KV cache in use that leaves no room for another long request
_NO_SUCH_PATH = (400, 404, 405, 501)  # of a server that does not generate tokens
_COUNTED = {
    "preemptions": "server-preemptions",
    "failed": "server-errors",
    "corrupted": "server-corrupted",
}
# Pairs: an id of recipes/doctor/server.toml, and the fields of its text.
_Judged = Iterator[tuple[str, Mapping[str, object]]]


def server_findings(
    node: str,
    answers: ServerAnswers,
    units: Sequence[UnitState],
) -> Findings:
    """Yield the findings of a server on a node; ``units`` are the systemd units of its cluster."""
    logs = "look into its log: patchkit doctor --log FILE"
    status = ssh_command(node, "ss", "-ltn")

    if units:
        logs = "patchkit logs"
        status = "patchkit status"

    states = [f"; {unit.unit} is {unit.active}" for unit in units if unit.unit]

    common: dict[str, object] = {
        "answers": answers,
        "logs": logs,
        "status": status,
        "units": "".join(states),
        "found": _describe_key(answers),
        "version": answers.version or "of an unknown release",
        "running": _show_count(answers, "running"),
        "waiting": _show_count(answers, "waiting"),
    }

    for about, fields in _judge(answers):
        yield make_finding(about, node, **{**common, **fields})


def _show_count(answers: ServerAnswers, figure: str) -> str:
    count = answers.figures.get(figure)
    return "unknown" if count is None else f"{count:.0f}"


def _describe_key(answers: ServerAnswers) -> str:
    """Return what was done with the API key of this cluster, "" if no key is known.

    The key is not sent to a process that is no rank of the cluster.
    """
    if answers.strangers:
        strangers = "; ".join(answers.strangers)
        return f", and none was sent: another listens there, {strangers}"

    return f", and the one in {answers.key} is not it" if answers.key else ""


def describe_server(answers: ServerAnswers) -> str:
    """Return a description of the server that answered, "" if nothing answered."""
    if not answers.health.status:
        return ""

    if answers.models:
        release = f"by vLLM {answers.version}" if answers.version else "and is no vLLM"
        return f"it serves {', '.join(answers.models[:3])}, {release}"

    listing = answers.listing.status or "nothing"
    return f"/health says {answers.health.status}, /v1/models {listing}"


def _judge(answers: ServerAnswers) -> _Judged:
    health = answers.health
    if not health.status:
        trouble = health.trouble or "no answer"
        hangs = trouble.startswith("no answer in")
        about = "server-health-silent" if hangs else "server-answers"
        yield about, {"trouble": trouble}
        return

    if health.status == 503:
        yield "server-health-dead", {}
    elif health.status != 200:
        yield "server-health", _path_fields(health)

    if _is_refused(answers.listing.status):
        yield "server-key", _path_fields(answers.listing)
    elif not answers.models:
        yield "server-models", _path_fields(answers.listing)

    # Without the key all paths below /v1 are refused: "server-key" says so.
    token = answers.token
    if token and token.model and not _is_refused(token.status):
        yield from _judge_token(answers, token)

    yield from _judge_load(answers)


def _is_refused(status: int) -> bool:
    return status in (401, 403)


def _path_fields(path: PathAnswer) -> Mapping[str, object]:
    trouble = f": {path.trouble}" if path.trouble else ""
    return {"status": path.status or "no answer", "trouble": trouble}


def _judge_load(answers: ServerAnswers) -> _Judged:
    figures = answers.figures
    if "kv-usage" not in figures:
        reason = f"/metrics says {answers.metrics.status}"
        if answers.metrics.status == 200:
            reason = "/metrics has no figure of the cache, or an odd one"
        yield "server-metrics", {"reason": answers.metrics.trouble or reason}
        return

    shown_hits = ""
    hits = figures.get("prefix-hits")
    queries = figures.get("prefix-queries")

    if hits and queries:
        shown_hits = f"; prefix cache: {100 * hits / queries:.0f} % hits"

    is_full = figures["kv-usage"] > _FULL and figures.get("waiting")
    fields = {"usage": f"{figures['kv-usage'] * 100:.0f}", "hits": shown_hits}
    yield "server-kv" if is_full else "server-load", fields

    for figure, about in _COUNTED.items():
        if figures.get(figure):
            yield about, {"count": f"{figures[figure]:.0f}"}


def _judge_token(answers: ServerAnswers, answer: TokenAnswer) -> _Judged:
    """Yield the findings about the request for one token."""
    refusal = {"status": answer.status, "said": answer.said or answer.trouble}
    is_refused = answer.status not in (0, 200) or (answer.said and not answer.fields)
    if answer.fields == EMBEDDING:
        refusal["said"] = "an embedding or a score came"
        yield "server-token-other", refusal
    elif answer.status in _NO_SUCH_PATH:
        yield "server-token-other", refusal
    elif is_refused:
        yield "server-token-refused", refusal
    elif answer.fields:
        yield "server-token", {"ms": f"{answer.ms:.0f}"}
        thoughts = [name for name in answer.fields if name.startswith("reasoning")]
        if thoughts:
            yield "server-reasoning", {"field": " and ".join(thoughts)}
    elif answer.tokens:
        finish = answer.finish or "none"
        yield "server-content", {"tokens": answer.tokens, "finish": finish}
    else:
        waits = answers.figures.get("waiting")
        about = "server-token-queue" if waits else "server-token-none"
        yield about, {"trouble": answer.trouble or "the answer has none"}
