"""Say how the server of a cluster is: whether it answers, what watches it, and what comes next."""

from __future__ import annotations

from dataclasses import dataclass

from patchkit.cluster.agent.judge import (
    ANSWERS,
    BLIND,
    DOUBT,
    ENDED,
    LIVES,
    PAUSED,
    REFUSES,
    SLEEPS,
    WORKS,
    ServerLife,
    read_life,
)
from patchkit.cluster.agent.node_state import NodeState
from patchkit.cluster.agent.unit_state import OFF, UnitState
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.openai.server_answers import ServerAnswers, ask_server
from patchkit.cluster.ssh.ssh import ssh_command
from patchkit.errors import HostError, PatchkitError
from patchkit.quoting import quoted

_STATUS = quoted("patchkit", "status")
# What a server shows that lives and gives no token until somebody lets it → why.
_HALTS = {
    SLEEPS: "somebody sent it POST /sleep; POST /wake_up ends that",
    PAUSED: "somebody sent it POST /pause; POST /resume ends that",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCondition:
    """``life`` is what the server shows when it is asked; None where its unit is not active.

    ``unasked`` says why it could not be asked. ``watch`` is the last word of the unit that watches
    it, and ``unwatched`` says that this unit does not run though it should. ``model`` is served.
    """

    life: ServerLife | None = None
    unasked: str = ""
    watch: ServerLife | None = None
    unwatched: str = ""
    model: str = ""

    @property
    def answers(self) -> bool:
        """Return whether a token came."""
        return self.life is not None and self.life.state == ANSWERS

    @property
    def hangs(self) -> str:
        """Return what shows that the server hangs, "" for one that does not."""
        return self.life.text if self.life and self.life.state == DOUBT else ""


def ask_life(cluster: Cluster) -> ServerLife:
    """Ask the server for a token, on the head; return what it shows. Raises HostError."""
    return cluster.head.call(ServerAnswers, ask_server, cluster=cluster.file.name).life


def server_condition(cluster: Cluster, head: NodeState | None) -> ServerCondition:
    """Return how the server is, by its head's units and its own answer."""
    if head is None or head.units[0].active != "active":
        return ServerCondition()
    try:
        life = ask_life(cluster)
    except PatchkitError as error:
        return ServerCondition(unasked=error.what)
    guard = head.unit(cluster.file.guard_unit)
    return ServerCondition(
        life=life,
        watch=read_life(guard.text) if guard and guard.active not in OFF else None,
        unwatched=guard.active if guard and is_unwatched(cluster, guard) else "",
        model=head.model,
    )


def is_unwatched(cluster: Cluster, guard: UnitState) -> bool:
    """Return whether the unit that watches the server is off, though the cluster wants it."""
    return bool(cluster.file.serve.frozen) and guard.active in OFF


def standstill_error(
    cluster: Cluster, life: ServerLife, guard: UnitState | None
) -> HostError | None:
    """Return why it is in vain to wait for a token; None for a server that works on."""
    if life.state not in (LIVES, WORKS):
        return silence_error(cluster, life, guard)

    name = cluster.head.destination
    if why := _HALTS.get(life.text):
        again = f"`{quoted('patchkit', 'down')}`, then `patchkit up` again"
        return HostError(
            f"{name}: {life.text}, and gives no token", why=why, hint=again
        )
    return None


def silence_error(
    cluster: Cluster, life: ServerLife, guard: UnitState | None
) -> HostError:
    """Return what is wrong with a server that gives no token, and what becomes of it."""
    name = cluster.head.destination
    if life.state == ENDED:
        return HostError(
            f"{name}: the server has ended: {life.text}",
            why="systemd starts all ranks anew 20 s after the head's unit ends",
            hint=_STATUS,
        )
    if life.state == BLIND:
        return HostError(
            f"{name}: {life.text}",
            why="what answers may not be the model, and the key goes to nobody else",
            hint=ssh_command(name, "ss", "-ltnp"),
        )
    if life.state == REFUSES:
        return HostError(
            f"{name}: {life.text}",
            why="whether its engine works is not known; a key in VLLM_API_KEY may have changed",
            hint=quoted("patchkit", "doctor", "--cluster"),
        )
    what = f"{name}: the model hangs: {life.text}"
    frozen = cluster.file.serve.frozen
    if not frozen or guard is None or is_unwatched(cluster, guard):
        why = "its unit runs, its server gives no token, and nothing watches it"
        return HostError(what, why=why, hint=quoted("patchkit", "down"))
    watch = read_life(guard.text)
    doubt = f" ({watch.text})" if watch and watch.state == DOUBT else ""
    return HostError(
        what,
        why=f"after {frozen} s without a sign of life the watch kills it, and systemd starts it "
        f"again{doubt}",
        hint=_STATUS,
    )
