"""Install the same wheels on every node of a cluster, and let it use them once all are equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from patchkit.cluster.agent import installation
from patchkit.cluster.agent.installation import InstalledVenv, InstallState, WheelLock
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.ssh.node import Remote, all_of, everywhere
from patchkit.cluster.ssh.rsync import Copied
from patchkit.cluster.ssh.ssh import HERE, ssh_words
from patchkit.errors import HostError

Report = Callable[[str], Callable[[int, int], None]]
"""Takes a task; returns what takes its progress."""

_SHOWN = 12  # digits of a digest in a table


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelCopy:
    """Wheels that went to a node, and how fast."""

    node: str
    wheels: int
    sent: Copied


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """What an installation came to, node by node; ``before`` is what each node had."""

    copies: tuple[WheelCopy, ...]
    before: tuple[InstallState, ...]
    made: tuple[InstalledVenv, ...]


def install_everywhere(
    cluster: Cluster, folder: Path, lock: WheelLock, report: Report
) -> Installed:
    """Copy what nodes lack, make the environment on each, and switch to it once all are equal.

    Raises what stands in the way of any node before a byte is copied; HostError if they differ.
    """
    here, sent = Remote(HERE), asdict(lock)

    def copy(entry: tuple[Remote, InstallState]) -> WheelCopy | None:
        node, state = entry
        if not state.lacking:
            return None
        words = () if node.here else ssh_words(node.destination, "-o", "ControlMaster=no")
        took = here.follow(
            Copied,
            report(f"{node.destination}: copying"),
            installation.send_wheels,
            folder=str(folder),
            names=state.lacking,
            ssh=words[:-2],
            destination="" if node.here else node.destination,
            target=state.store,
        )
        return WheelCopy(node=node.destination, wheels=len(state.lacking), sent=took)

    def make(node: Remote) -> InstalledVenv:
        progress = report(f"{node.destination}: installing")
        return node.follow(InstalledVenv, progress, installation.install_wheels, lock=sent)

    with cluster.alone():
        look, asked = installation.look_at_installation, {"venv": cluster.file.venv, "lock": sent}
        found = everywhere(cluster.nodes, lambda node: node.call(InstallState, look, **asked))
        states = all_of(found)
        copies = all_of(everywhere(list(zip(cluster.nodes, states, strict=True)), copy))
        made = all_of(everywhere(cluster.nodes, make))
        _check_equal(cluster, made)
        switch, place = installation.switch_link, {"venv": cluster.file.venv, "name": lock.id}
        all_of(everywhere(cluster.nodes, lambda node: node.call(str, switch, **place)))
    done = tuple(copy for copy in copies if copy)
    return Installed(copies=done, before=tuple(states), made=tuple(made))


def _check_equal(cluster: Cluster, made: Sequence[InstalledVenv]) -> None:
    """Raise HostError with a line for each thing that is not the same everywhere."""
    found = [
        {
            "python": venv.python,
            "files": venv.record[:_SHOWN],
            "libnccl": f"{venv.nccl} {venv.nccl_version} {venv.nccl_sha256[:_SHOWN]}",
            **venv.versions,
        }
        for venv in made
    ]
    lines = []
    for name in sorted({name for its in found for name in its}):
        values = [its.get(name, "none") for its in found]
        if len(set(values)) > 1:
            nodes = (node.destination for node in cluster.nodes)
            pairs = zip(nodes, values, strict=True)
            lines.append(f"  {name}: " + ", ".join(f"{value} on {node}" for node, value in pairs))
    if lines:
        what = "what is installed differs from node to node, and nothing was switched:"
        raise HostError(
            "\n".join([what, *lines]),
            why="one rank would not do what the other does",
            hint="patchkit verify",
        )
