"""Serve a model for a time: it is stopped when who asked for it ends, however that ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from patchkit.cluster.agent import control
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.start import Answered, StartWatcher, read_failed_start
from patchkit.cluster.launch.stop import check_stopped, stop_group
from patchkit.cluster.launch.up import bring_up, wait_for
from patchkit.durable.signals import committed
from patchkit.errors import HostError


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldGroup:
    """A model that answers: at ``url``, after so many seconds; ``since`` is for its journal."""

    cluster: Cluster
    url: str
    since: str
    answered: Answered
    watcher: StartWatcher

    def until_it_ends(self) -> HostError:
        """Return why the group ended by itself; wait for that as long as it takes."""
        units = [self.cluster.file.unit]
        for (now,) in self.cluster.follow(units):
            if now.active != "active":
                again = now.sub == "auto-restart"
                failed = read_failed_start(self.cluster, self.since, now, again=again)
                return self.watcher.explain(failed)
        return HostError(f"{self.cluster.head.destination}: the answer was cut short")


@contextmanager
def hold_model(cluster: Cluster, model: str, watcher: StartWatcher) -> Iterator[HeldGroup]:
    """Serve a model for the time of a block, then stop it on every node, and check.

    If this process is killed, the head's systemd stops the group. Raises what ``bring_up``,
    ``wait_for`` and ``check_stopped`` raise.
    """
    begun = bring_up(cluster, model, lasting=False)
    with ExitStack() as watch:
        try:
            watch.enter_context(
                cluster.head.opened(bool, control.hold_group, name=cluster.file.name)
            )
            done = wait_for(cluster, begun, watcher)
            yield HeldGroup(
                cluster=cluster,
                url=begun.plan.units.url,
                since=begun.since,
                answered=done,
                watcher=watcher,
            )
        finally:
            with cluster.alone():
                results = stop_group(cluster)
            watch.close()
            check_stopped(cluster, results)
            committed(f"{begun.plan.model.name} is stopped on every node")
