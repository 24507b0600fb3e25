"""Judge the server of a cluster: does it answer, does a unit watch it, what happens next."""

from patchkit.cluster.agent.judge import (
    ANSWERS,
    DOUBT,
    LIVES,
    PAUSED,
    SLEEPS,
    WORKS,
    ServerLife,
    read_life,
)
from patchkit.cluster.agent.node_state import NodeState
from patchkit.cluster.agent.unit_state import OFF, UnitState
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.openai.server_answers import (
    ServerAnswers,
    ServerSpeed,
    ask_server,
)
from patchkit.cluster.ssh.ssh import ssh_command
from patchkit.errors import PatchkitError
from patchkit.finding import finding_from_text
from patchkit.frozen import frozen

_TEXTS = "standstill.toml"
# Texts of a server that lives, but gives no token until somebody wakes it → their finding.
_HALTS = {SLEEPS: "sleeps", PAUSED: "paused"}


@frozen
class ServerCondition:
    """The condition of a cluster's server, which serves ``model``.

    ``life`` is the server's answer, None if its unit is not active or it could not be asked;
    ``unasked`` says why it could not. ``speed`` is None if it is unknown. ``watch`` is the last
    report of the unit that watches the server; ``unwatched`` is the state of that unit ("inactive",
    "failed") if it is off though cluster.toml wants it, else "".
    """

    life: ServerLife | None = None
    speed: ServerSpeed | None = None
    unasked: str = ""
    watch: ServerLife | None = None
    unwatched: str = ""
    model: str = ""

    @property
    def answers(self) -> bool:
        """Return whether the server gave a token."""
        return self.life is not None and self.life.state == ANSWERS

    @property
    def hangs(self) -> str:
        """Return the words that say how the server hangs, "" if it does not."""
        if self.life and self.life.state == DOUBT:
            return self.life.text
        return ""


def ask_life(cluster: Cluster) -> ServerLife:
    """Ask the server for a token, on the head; return its signs of life. Raises HostError."""
    return _ask(cluster).life


def _ask(cluster: Cluster, *, speed: bool = False) -> ServerAnswers:
    asked = {"cluster": cluster.name, "speed": speed}
    return cluster.head.call(ServerAnswers, ask_server, **asked)


def server_condition(cluster: Cluster, head: NodeState | None) -> ServerCondition:
    """Return the condition of the server; the server is asked if its unit is active.

    ``head`` is the state of the head, None if it is not known. An error of the question is in
    ``unasked``.
    """
    if head is None or head.units[0].active != "active":
        return ServerCondition()

    try:
        answers = _ask(cluster, speed=True)
    except PatchkitError as error:
        return ServerCondition(unasked=error.what)

    watch = None
    unwatched = ""
    if guard := head.unit(cluster.guard_unit):
        if guard.active not in OFF:
            watch = read_life(guard.text)
        if is_unwatched(cluster, guard):
            unwatched = guard.active

    return ServerCondition(
        life=answers.life,
        speed=answers.speed,
        watch=watch,
        unwatched=unwatched,
        model=head.model,
    )


def is_unwatched(cluster: Cluster, guard: UnitState) -> bool:
    """Return whether the unit that watches the server is off, though cluster.toml wants it."""
    return bool(cluster.serve.frozen) and guard.active in OFF


def standstill_error(
    cluster: Cluster,
    life: ServerLife,
    guard: UnitState | None,
) -> PatchkitError | None:
    """Return the error of a server that will give no token; None if it goes on working.

    ``life`` shows that no token came. ``guard`` is the state of the unit that watches the server,
    None if there is none. The reason says what happens next.
    """
    about = life.state
    if about in (LIVES, WORKS):
        about = _HALTS.get(life.text, "")
    if not about:
        return None

    doubt = ""
    if about == DOUBT:
        if guard is None or guard.active in OFF or not cluster.serve.frozen:
            about = "unwatched"
        elif (watch := read_life(guard.text)) and watch.state == DOUBT:
            doubt = f" ({watch.text})"

    name = cluster.head.destination
    return finding_from_text(
        _TEXTS,
        about,
        name,
        said=life.text,
        frozen=cluster.serve.frozen,
        doubt=doubt,
        look=ssh_command(name, "ss", "-ltnp"),
    ).error()
