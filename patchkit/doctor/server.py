"""Judge what a server said of itself: whether it answers, what it sends, its load. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from patchkit.cluster.agent.server_answers import ServerAnswers
from patchkit.cluster.agent.unit_state import UnitState
from patchkit.cluster.openai.answer_parts import StreamedAnswer
from patchkit.cluster.openai.api_key import is_here
from patchkit.cluster.ssh.ssh import there
from patchkit.finding import Finding, finding_from_text
from patchkit.quoting import quoted

_FILE = "server.toml"
_FULL = 0.95  # of the KV cache: what is left does not hold another long request
_CLUSTER_LOGS, _CLUSTER_STATUS = "patchkit logs", "patchkit status"


def server_findings(
    node: str, said: ServerAnswers, units: Sequence[UnitState] = (), model: str = ""
) -> Iterator[Finding]:
    """Yield what is to be said of a server on a node; ``units`` are the cluster's, if it has any.

    ``model`` is the name that clients are meant to use, "" for any.
    """
    judge = _Judge(node, said, tuple(units))
    if not said.health.status:
        yield judge.silent()
        return
    yield from judge.health()
    yield from judge.names(model)
    yield from judge.token()
    yield from judge.load()


class _Judge:
    """One server's answers, with what every text about them needs."""

    def __init__(self, node: str, said: ServerAnswers, units: tuple[UnitState, ...]) -> None:
        self.node, self.answers, self.units = node, said, units
        self.figures = said.figures.numbers

    def say(self, about: str, **fields: object) -> Finding:
        own = {"node": self.node, "logs": self._logs(), "look": self._look("/v1/models")}
        return finding_from_text(_FILE, about, self.node, **{**own, **fields})

    def _logs(self) -> str:
        return _CLUSTER_LOGS if self.units else "look into its log: patchkit doctor --log FILE"

    def _look(self, path: str) -> str:
        return there(self.node, "curl", "-sS", "-m", "10", f"{self.answers.url.rstrip('/')}{path}")

    def silent(self) -> Finding:
        """Return why nothing was looked at: no server answers, or it hangs before it does."""
        trouble = self.answers.health.trouble or "no answer"
        if trouble.startswith("no answer in"):
            return self.say("server-health-silent", trouble=trouble)
        states = "; ".join(f"{each.unit} is {each.active}" for each in self.units if each.unit)
        here = there(self.node, "ss", "-ltn")
        apart = here if is_here(self.answers.url) else self._look("/health")
        status = _CLUSTER_STATUS if self.units else apart
        units = f"; {states}" if states else ""
        return self.say(
            "server-answers", url=self.answers.url, trouble=trouble, units=units, status=status
        )

    def health(self) -> Iterator[Finding]:
        health = self.answers.health
        if health.status == 503:
            yield self.say("server-health-dead")
        elif health.status != 200:
            yield self.say(
                "server-health", status=health.status, trouble=_with_colon(health.trouble)
            )

    def names(self, model: str) -> Iterator[Finding]:
        """Yield what is wrong with the list of models: refused, empty, or without this one."""
        listing, names = self.answers.listing, [each.name for each in self.answers.models]
        if listing.status in (401, 403):
            given = f", and the one in {self.answers.key} is not it" if self.answers.key else ""
            yield self.say("server-key", status=listing.status, found=given)
        elif not names:
            trouble = _with_colon(listing.trouble)
            yield self.say("server-models", status=listing.status or "no answer", trouble=trouble)
        elif model and model not in names:
            yield self.say("server-model", model=quoted(model), models=", ".join(names))

    def token(self) -> Iterator[Finding]:
        answer = self.answers.token
        # Whatever asks below /v1 without the key has been told so.
        if answer is None or answer.status in (401, 403):
            return
        model, refused = self.answers.asked, answer.said or answer.trouble
        if answer.status in (400, 404, 405, 501):
            yield self.say("server-token-other", model=model, status=answer.status, said=refused)
        elif answer.status not in (0, 200) or (answer.said and answer.first_ms is None):
            yield self.say("server-token-refused", status=answer.status, said=refused)
        elif answer.first_ms is None and not answer.completion_tokens:
            yield self._no_token(answer)
        elif answer.trouble or answer.said:
            yield self.say("server-token-cut", trouble=answer.trouble or answer.said)
        else:
            yield from self._answered(answer)

    def _no_token(self, answer: StreamedAnswer) -> Finding:
        trouble = answer.trouble or "the stream ended without one"
        running, waiting = self._count("running"), self._count("waiting")
        if self.figures.get("waiting"):
            return self.say("server-token-queue", trouble=trouble, running=running, waiting=waiting)
        return self.say("server-token-none", trouble=trouble)

    def _answered(self, answer: StreamedAnswer) -> Iterator[Finding]:
        if answer.first_ms is None:
            finish = answer.finish or "none"
            yield self.say("server-content", tokens=answer.completion_tokens, finish=finish)
            return
        version = self.answers.version or "of an unknown release"
        yield self.say(
            "server-token",
            model=self.answers.asked,
            first=f"{answer.first_ms:.0f}",
            rate="" if answer.rate is None else f"then {answer.rate:.1f} tokens/s, ",
            version=version,
        )
        thoughts = [each for each in answer.fields if each.startswith("reasoning")]
        if thoughts:
            yield self.say("server-reasoning", field=" and ".join(thoughts))

    def load(self) -> Iterator[Finding]:
        """Yield what /metrics says of cache and load."""
        metrics, found = self.answers.metrics, self.figures
        if "kv-usage" not in found:
            reason = metrics.trouble or f"/metrics says {metrics.status}"
            if metrics.status == 200:
                reason = "/metrics has none of the figures"
            yield self.say("server-metrics", reason=reason, look=self._look("/metrics"))
            return
        usage, waiting = f"{found['kv-usage'] * 100:.0f}", self._count("waiting")
        if found["kv-usage"] > _FULL and found.get("waiting"):
            yield self.say("server-kv", usage=usage, waiting=waiting)
        else:
            load = {"running": self._count("running"), "waiting": waiting, "usage": usage}
            yield self.say("server-load", hits=self._hits(), **load)
        for figure, about in (
            ("preemptions", "server-preemptions"),
            ("failed", "server-errors"),
            ("corrupted", "server-corrupted"),
        ):
            if found.get(figure):
                yield self.say(about, count=self._count(figure))

    def _hits(self) -> str:
        queries, hits = self.figures.get("prefix-queries", 0), self.figures.get("prefix-hits")
        return f"; prefix cache: {100 * hits / queries:.0f} % hits" if hits and queries else ""

    def _count(self, figure: str) -> str:
        found = self.figures.get(figure)
        return "unknown" if found is None else f"{found:.0f}"


def _with_colon(trouble: str) -> str:
    return f": {trouble}" if trouble else ""
