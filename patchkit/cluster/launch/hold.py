"""Serve a model for a time: it is stopped when who asked for it ends, however that ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from patchkit.cluster.agent import control
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.start import Answered, failed
from patchkit.cluster.launch.stop import check_stopped, stopped
from patchkit.cluster.launch.up import Tell, bring_up, wait_for
from patchkit.durable.signals import committed
from patchkit.errors import HostError


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldGroup:
    """A model that answers: at ``url``, after so many seconds; ``since`` is for its journal."""

    cluster: Cluster
    url: str
    since: str
    answered: Answered

    def until_it_ends(self) -> HostError:
        """Return why the group ended by itself; wait for that as long as it takes."""
        units = [self.cluster.file.unit]
        for (now,) in self.cluster.follow(units):
            if now.active != "active":
                return failed(self.cluster, self.since, now, again=now.sub == "auto-restart")
        return HostError(f"{self.cluster.head.destination}: the answer was cut short")


@contextmanager
def held(cluster: Cluster, model: str, tell: Tell) -> Iterator[HeldGroup]:
    """Serve a model for the time of a block, then stop it on every node, and check.

    If this process is killed, the head's systemd stops the group. Raises what ``bring_up``,
    ``wait_for`` and ``check_stopped`` raise.
    """
    begun = bring_up(cluster, model, lasting=False)
    with ExitStack() as watch:
        try:
            watch.enter_context(cluster.head.opened(bool, control.hold, name=cluster.file.name))
            done = wait_for(cluster, begun, tell)
            url = begun.plan.units.url
            yield HeldGroup(cluster=cluster, url=url, since=begun.since, answered=done)
        finally:
            with cluster.alone():
                results = stopped(cluster)
            watch.close()
            check_stopped(cluster, results)
            committed(f"{begun.plan.model.name} is stopped on every node")
