"""Judge what a server said of itself: whether it answers, what it sends, its load. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from patchkit.cluster.agent.server_answers import ServerAnswers
from patchkit.cluster.agent.unit_state import UnitState
from patchkit.cluster.openai.answer_stream import StreamedAnswer
from patchkit.cluster.openai.api_key import is_here
from patchkit.cluster.ssh.ssh import there
from patchkit.doctor.peers.check import make_finding
from patchkit.finding import Finding

_FULL = 0.95  # of the KV cache: what is left does not hold another long request


def server_findings(
    node: str, said: ServerAnswers, units: Sequence[UnitState] = ()
) -> Iterator[Finding]:
    """Yield what is to be said of a server on a node; ``units`` are its cluster's."""
    judge = _Judge(node, said, tuple(units))
    if not said.health.status:
        yield judge.explain_silence()
        return
    yield from judge.judge_health()
    yield from judge.judge_names()
    yield from judge.judge_token()
    yield from judge.judge_load()


class _Judge:
    """One server's answers, with what every text about them needs."""

    def __init__(self, node: str, said: ServerAnswers, units: tuple[UnitState, ...]) -> None:
        self.node, self.answers, self.units = node, said, units
        self.figures = said.figures

    def find(self, about: str, **fields: object) -> Finding:
        """Return a finding of recipes/doctor/server.toml."""
        logs = "patchkit logs" if self.units else "look into its log: patchkit doctor --log FILE"
        own = {"node": self.node, "logs": logs, "look": self._curl("/v1/models")}
        return make_finding(about, self.node, **{**own, **fields})

    def _curl(self, path: str) -> str:
        return there(self.node, "curl", "-sS", "-m", "10", f"{self.answers.url.rstrip('/')}{path}")

    def explain_silence(self) -> Finding:
        """Return why nothing was looked at: no server answers, or it hangs before it does."""
        url, trouble = self.answers.url, self.answers.health.trouble or "no answer"
        if trouble.startswith("no answer in"):
            return self.find("server-health-silent", trouble=trouble)
        states = [f"; {unit.unit} is {unit.active}" for unit in self.units if unit.unit]
        status = there(self.node, "ss", "-ltn") if is_here(url) else self._curl("/health")
        if self.units:
            status = "patchkit status"
        fields = {"url": url, "trouble": trouble, "units": "".join(states), "status": status}
        return self.find("server-answers", **fields)

    def judge_health(self) -> Iterator[Finding]:
        health = self.answers.health
        if health.status == 503:
            yield self.find("server-health-dead")
        elif health.status != 200:
            trouble = health.trouble and f": {health.trouble}"
            yield self.find("server-health", status=health.status, trouble=trouble)

    def judge_names(self) -> Iterator[Finding]:
        """Yield what is wrong with the list of models: refused, or empty."""
        listing = self.answers.listing
        if listing.status in (401, 403):
            given = f", and the one in {self.answers.key} is not it" if self.answers.key else ""
            yield self.find("server-key", status=listing.status, found=given)
        elif not self.answers.models:
            trouble = listing.trouble and f": {listing.trouble}"
            status = listing.status or "no answer"
            yield self.find("server-models", status=status, trouble=trouble)

    def judge_token(self) -> Iterator[Finding]:
        answer = self.answers.token
        # Whatever asks below /v1 without the key has been told so.
        if answer is None or answer.status in (401, 403):
            return
        fields: dict[str, object] = {"model": self.answers.asked, "status": answer.status}
        refused = answer.said or answer.trouble
        cut = answer.trouble or answer.said
        if answer.status in (400, 404, 405, 501):
            yield self.find("server-token-other", said=refused, **fields)
        elif answer.status not in (0, 200) or (answer.said and answer.first_ms is None):
            yield self.find("server-token-refused", said=refused, **fields)
        elif answer.first_ms is None and not answer.completion_tokens:
            about = "server-token-queue" if self.figures.get("waiting") else "server-token-none"
            trouble = answer.trouble or "the stream ended without one"
            yield self.find(about, trouble=trouble, **self._counts())
        elif cut:
            yield self.find("server-token-cut", trouble=cut)
        else:
            yield from self._judge_answer(answer)

    def _judge_answer(self, answer: StreamedAnswer) -> Iterator[Finding]:
        if answer.first_ms is None:
            finish = answer.finish or "none"
            yield self.find("server-content", tokens=answer.completion_tokens, finish=finish)
            return
        yield self.find(
            "server-token",
            model=self.answers.asked,
            first=f"{answer.first_ms:.0f}",
            rate="" if answer.rate is None else f"then {answer.rate:.1f} tokens/s, ",
            version=self.answers.version or "of an unknown release",
        )
        thoughts = [name for name in answer.fields if name.startswith("reasoning")]
        if thoughts:
            yield self.find("server-reasoning", field=" and ".join(thoughts))

    def judge_load(self) -> Iterator[Finding]:
        """Yield what /metrics says of cache and load."""
        metrics, found = self.answers.metrics, self.figures
        if "kv-usage" not in found:
            reason = metrics.trouble or f"/metrics says {metrics.status}"
            if metrics.status == 200:
                reason = "/metrics has none of the figures"
            yield self.find("server-metrics", reason=reason, look=self._curl("/metrics"))
            return
        full = found["kv-usage"] > _FULL and found.get("waiting")
        queries, hits = found.get("prefix-queries", 0), found.get("prefix-hits", 0)
        yield self.find(
            "server-kv" if full else "server-load",
            usage=f"{found['kv-usage'] * 100:.0f}",
            hits=f"; prefix cache: {100 * hits / queries:.0f} % hits" if hits and queries else "",
            **self._counts(),
        )
        for figure, about in (
            ("preemptions", "server-preemptions"),
            ("failed", "server-errors"),
            ("corrupted", "server-corrupted"),
        ):
            if found.get(figure):
                yield self.find(about, count=f"{found[figure]:.0f}")

    def _counts(self) -> dict[str, str]:
        counts = {name: self.figures.get(name) for name in ("running", "waiting")}
        return {name: "unknown" if n is None else f"{n:.0f}" for name, n in counts.items()}
