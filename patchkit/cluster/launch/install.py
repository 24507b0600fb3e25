"""Install the same wheels on every node of a cluster, and let it use them once all are equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from patchkit.cluster.agent import venv_install, venv_link, wheel_store
from patchkit.cluster.agent.venv_install import InstalledVenv
from patchkit.cluster.agent.venv_link import InstallState
from patchkit.cluster.agent.wheel_store import WheelLock
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.plan import node_addresses
from patchkit.cluster.models.sync import follow_answers
from patchkit.cluster.ssh.node import Remote, all_of, everywhere
from patchkit.cluster.ssh.rsync import INSTALL, Copied
from patchkit.cluster.ssh.ssh import ssh_words, there
from patchkit.errors import HostError, StorageError, UsageError
from patchkit.quoting import quoted

Report = Callable[[str], Callable[[int, int], None]]
"""Takes a task; returns what takes its progress."""

_SPARE = 1.05
_SHOWN = 12  # digits of a digest in a table
_EMPTY = 30 << 20  # bytes of an environment with pip alone


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelCopy:
    """Wheels that went to a node: from where, ``""`` for here, and how fast."""

    node: str
    source: str
    wheels: int
    sent: Copied


def survey_installations(cluster: Cluster, lock: WheelLock) -> list[InstallState]:
    """Return what each node has. Raises what stands in the way, of all nodes at once."""
    asked = {"venv": cluster.file.venv, "lock": asdict(lock)}

    def ask(node: Remote) -> InstallState:
        state = node.call(InstallState, venv_link.look_at_installation, **asked)
        _check_node(node.destination, state, lock)
        return state

    return all_of(everywhere(cluster.nodes, ask))


def _check_node(name: str, state: InstallState, lock: WheelLock) -> None:
    """Raise what keeps a node from installing; each says what to do about it."""
    if state.foreign:
        raise UsageError(
            f"{name}: {state.foreign}",
            hint='name another path in cluster.toml: venv = "~/patchkit-venv"',
        )
    if state.installed:
        return
    if lock.cpu not in ("", state.cpu):
        raise HostError(f"{name}: is a machine of {state.cpu}, and the wheels are for {lock.cpu}")
    if not state.python:
        raise HostError(
            f"{name}: has Python {state.release}, and the wheels are for {lock.python}",
            hint=quoted("patchkit", "wheelhouse", "fill", "--python-version", state.release),
        )
    if not state.has_venv:
        hint = there(name, "sudo", "apt", "install", f"python{lock.python}-venv")
        raise HostError(f"{name}: Python there cannot make environments", hint=hint)
    if state.lacking and not state.has_rsync:
        raise HostError(f"{name}: rsync is not installed there", hint=there(name, *INSTALL))
    needed = int(sum(bytes_needed(state, lock)) * _SPARE)
    if needed > state.free:
        raise StorageError(
            f"{name}: {needed / 1e9:,.2f} GB are needed ({needed} bytes), and "
            f"{state.free / 1e9:,.2f} GB are free",
            hint="make room there; old environments are in ~/.local/share/patchkit/venvs",
        )


def bytes_needed(state: InstallState, lock: WheelLock) -> tuple[int, int]:
    """Return the bytes that a node lacks, and those of the environment that is to be made."""
    copied = sum(wheel.size for wheel in lock.wheels if wheel.name in state.lacking)
    unpacked = _EMPTY + sum(wheel.unpacked for wheel in lock.wheels)
    return copied, 0 if state.installed else unpacked


def copy_wheels(
    cluster: Cluster, folder: Path, lock: WheelLock, states: Sequence[InstallState], report: Report
) -> list[WheelCopy]:
    """Send every node the wheels that it lacks: to the head from here, on from there.

    A worker that the head does not reach gets them from here.
    """
    head, store = cluster.nodes[0], states[0].store
    behind = [number for number, state in enumerate(states) if number and state.lacking]
    links = {}
    if behind:
        serve = cluster.file.serve
        choices = {"topology": serve.topology, "target": serve.target}
        try:
            addresses = node_addresses(cluster.file, cluster.facts(), choices)
        except HostError:
            addresses = [""] * len(cluster.nodes)  # no cable: as ssh finds its way
        entries = [cluster.file.node[number] for number in behind]
        found = cluster.try_links(entries, [addresses[number] for number in behind])
        reached = zip(behind, found, strict=True)
        links = {number: link.words for number, link in reached if not link.error}
    # The head passes on what it need not have for itself.
    first = {name for number in (0, *links) for name in states[number].lacking}

    def send(number: int) -> WheelCopy | None:
        node, words = cluster.nodes[number], links.get(number, ())
        source = head if words else Remote("localhost")
        if not words and not node.here:
            words = ssh_words(node.destination, "-o", "ControlMaster=no")
        lacking = states[number].lacking if number else first
        wheels = [asdict(wheel) for wheel in lock.wheels if wheel.name in lacking]
        names = node.call(list[str], wheel_store.receive_wheels, wheels=wheels)
        if not names:
            return None
        answers = source.stream(
            dict[str, Any],
            wheel_store.send_wheels,
            folder=store if number in links else str(folder),
            names=names,
            ssh=list(words[:-2]),
            destination=words[-1] if words else "",
            target=states[number].store,
        )
        sent = follow_answers(source, Copied, answers, report(f"{node.destination}: copying"))
        place = source.destination if number in links else ""
        return WheelCopy(node=node.destination, source=place, wheels=len(names), sent=sent)

    copies = [send(0)] if first else []
    copies += all_of(everywhere(behind, send))
    return [copy for copy in copies if copy]


def install_everywhere(
    cluster: Cluster, lock: WheelLock, states: Sequence[InstallState], report: Report
) -> list[InstalledVenv]:
    """Make the environment on every node and check it there. Raises HostError if they differ."""

    def make(entry: tuple[Remote, InstallState]) -> InstalledVenv:
        node, state = entry
        asked = {"lock": asdict(lock), "python": state.python}
        answers = node.stream(dict[str, Any], venv_install.install_wheels, **asked)
        progress = report(f"{node.destination}: installing")
        return follow_answers(node, InstalledVenv, answers, progress)

    made = all_of(everywhere(list(zip(cluster.nodes, states, strict=True)), make))
    if rows := find_differences(made):
        rows = [["", *(node.destination for node in cluster.nodes)], *rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        raise HostError(
            "\n".join(
                ["what is installed differs from node to node, and nothing was switched:", *lines]
            ),
            why="one rank would not do what the other does",
            hint="patchkit verify",
        )
    return made


def find_differences(made: Sequence[InstalledVenv]) -> list[list[str]]:
    """Return a row for each thing that is not the same everywhere: its name, and every value."""
    rows = {
        "python": [venv.python for venv in made],
        "files": [venv.record[:_SHOWN] for venv in made],
        "libnccl loaded": [venv.nccl for venv in made],
        "libnccl version": [venv.nccl_version for venv in made],
        "libnccl sha256": [venv.nccl_sha256[:_SHOWN] for venv in made],
    }
    for name in sorted({name for venv in made for name in venv.versions}):
        rows[name] = [venv.versions.get(name, "none") for venv in made]
    return [[name, *values] for name, values in rows.items() if len(set(values)) > 1]


def switch_links(cluster: Cluster, name: str) -> list[str]:
    """Let every node use an installation, the head first; return what each used before."""

    def change(node: Remote) -> str:
        return node.call(str, venv_link.switch_link, venv=cluster.file.venv, name=name)

    head, *workers = cluster.nodes
    return [change(head), *all_of(everywhere(workers, change))]
