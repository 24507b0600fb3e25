"""Judge what a server said of itself: whether it answers, what it sends, its load. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from patchkit.cluster.agent.unit_state import UnitState
from patchkit.cluster.openai.server_answers import EMBEDDING, ServerAnswers, TokenAnswer
from patchkit.cluster.ssh.ssh import ssh_command
from patchkit.doctor.peers.node_report import make_finding
from patchkit.finding import Finding
from patchkit.http_exchange import PathAnswer

_FULL = 0.95  # of the KV cache: what is left does not hold another long request
_COUNTED = {
    "preemptions": "server-preemptions",
    "failed": "server-errors",
    "corrupted": "server-corrupted",
}
_Judged = Iterator[
    tuple[str, Mapping[str, object]]
]  # ids of recipes/doctor/server.toml, fields


def server_findings(
    node: str, said: ServerAnswers, units: Sequence[UnitState] = ()
) -> Iterator[Finding]:
    """Yield what is to be said of a server on a node; ``units`` are its cluster's."""
    url, known = said.url.rstrip("/"), said.figures
    common: dict[str, object] = {
        "node": node,
        "url": said.url,
        "logs": "patchkit logs"
        if units
        else "look into its log: patchkit doctor --log FILE",
        "status": "patchkit status" if units else ssh_command(node, "ss", "-ltn"),
        "look": ssh_command(node, "curl", "-sS", "-m", "10", f"{url}/v1/models"),
        "units": "".join(
            f"; {unit.unit} is {unit.active}" for unit in units if unit.unit
        ),
        "found": _describe_key(said),
        "model": said.asked,
        "version": said.version or "of an unknown release",
        "running": f"{known['running']:.0f}" if "running" in known else "unknown",
        "waiting": f"{known['waiting']:.0f}" if "waiting" in known else "unknown",
    }
    for about, fields in _judge(said):
        yield make_finding(about, node, **{**common, **fields})


def _describe_key(said: ServerAnswers) -> str:
    """Return what became of the key that is known here."""
    if said.strangers:
        return (
            f", and none was sent: another listens there, {'; '.join(said.strangers)}"
        )
    return f", and the one in {said.key} is not it" if said.key else ""


def describe_server(said: ServerAnswers) -> str:
    """Return what answers requests, "" where nothing does."""
    if not said.health.status:
        return ""
    if said.models:
        release = f"by vLLM {said.version}" if said.version else "and is no vLLM"
        return f"it serves {', '.join(said.models[:3])}, {release}"
    return f"/health says {said.health.status}, /v1/models {said.listing.status or 'nothing'}"


def _judge(said: ServerAnswers) -> _Judged:
    if not said.health.status:
        trouble = said.health.trouble or "no answer"
        hangs = trouble.startswith("no answer in")
        yield (
            "server-health-silent" if hangs else "server-answers",
            {"trouble": trouble},
        )
        return
    if said.health.status == 503:
        yield "server-health-dead", {}
    elif said.health.status != 200:
        yield "server-health", _path_fields(said.health)
    if said.listing.status in (401, 403):
        yield "server-key", _path_fields(said.listing)
    elif not said.models:
        yield "server-models", _path_fields(said.listing)
    # Whatever asks below /v1 without the key has been told so.
    if said.token and said.token.status not in (401, 403):
        yield from _judge_token(said, said.token)
    metrics, figures = said.metrics, said.figures
    if "kv-usage" not in figures:
        none = (
            "has none of the figures"
            if metrics.status == 200
            else f"says {metrics.status}"
        )
        yield "server-metrics", {"reason": metrics.trouble or f"/metrics {none}"}
        return
    full = figures["kv-usage"] > _FULL and figures.get("waiting")
    queries, hits = figures.get("prefix-queries", 0), figures.get("prefix-hits", 0)
    fields = {
        "usage": f"{figures['kv-usage'] * 100:.0f}",
        "hits": f"; prefix cache: {100 * hits / queries:.0f} % hits"
        if hits and queries
        else "",
    }
    yield "server-kv" if full else "server-load", fields
    for figure, about in _COUNTED.items():
        if figures.get(figure):
            yield about, {"count": f"{figures[figure]:.0f}"}


def _path_fields(path: PathAnswer) -> Mapping[str, object]:
    trouble = f": {path.trouble}" if path.trouble else ""
    return {"status": path.status or "no answer", "trouble": trouble}


def _judge_token(said: ServerAnswers, answer: TokenAnswer) -> _Judged:
    refused = {"status": answer.status, "said": answer.said or answer.trouble}
    if answer.fields == EMBEDDING:
        yield "server-token-other", {**refused, "said": "an embedding or a score came"}
    elif answer.status in (400, 404, 405, 501):
        yield "server-token-other", refused
    elif answer.status not in (0, 200) or (answer.said and not answer.fields):
        yield "server-token-refused", refused
    elif not answer.fields and not answer.tokens:
        waits = said.figures.get("waiting")
        trouble = answer.trouble or "the answer has none"
        yield (
            "server-token-queue" if waits else "server-token-none",
            {"trouble": trouble},
        )
    elif not answer.fields:
        yield (
            "server-content",
            {"tokens": answer.tokens, "finish": answer.finish or "none"},
        )
    else:
        yield "server-token", {"ms": f"{answer.ms:.0f}"}
        if thoughts := [name for name in answer.fields if name.startswith("reasoning")]:
            yield "server-reasoning", {"field": " and ".join(thoughts)}
