"""Install the same wheels on every node of a cluster, and let it use them once all are equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from patchkit.cluster.agent import venv_install, venv_link, wheel_store
from patchkit.cluster.agent.installed import InstalledVenv
from patchkit.cluster.agent.links import PeerLink
from patchkit.cluster.agent.venv_link import InstallState, VenvLinks
from patchkit.cluster.agent.wheel_store import NodeWheel, WheelLock
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.plan import node_addresses
from patchkit.cluster.models.report import follow_answers
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
    asked = asdict(lock)

    def ask(node: Remote) -> InstallState:
        state = node.call(
            InstallState, venv_link.look_at_installation, venv=cluster.file.venv, lock=asked
        )
        _check_node(node, state, lock)
        return state

    return all_of(everywhere(cluster.nodes, ask))


def _check_node(node: Remote, state: InstallState, lock: WheelLock) -> None:
    """Raise what keeps a node from installing; each says what to do about it."""
    name = node.destination
    if state.foreign:
        raise UsageError(
            f"{name}: {state.foreign}",
            hint='name another path in cluster.toml: venv = "~/patchkit-venv"',
        )
    if state.installed:
        return
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
    needed = int((to_copy(state, lock) + to_unpack(state, lock)) * _SPARE)
    if needed > state.free:
        raise StorageError(
            f"{name}: {needed / 1e9:,.2f} GB are needed ({needed} bytes), and "
            f"{state.free / 1e9:,.2f} GB are free",
            hint="make room there; old environments are in ~/.local/share/patchkit/venvs",
        )


def to_copy(state: InstallState, lock: WheelLock) -> int:
    """Return the bytes that a node lacks."""
    return sum(each.size for each in lock.wheels if each.name in state.lacking)


def to_unpack(state: InstallState, lock: WheelLock) -> int:
    """Return the bytes of the environment that is to be made."""
    if state.installed:
        return 0
    return _EMPTY + sum(each.unpacked for each in lock.on(state.cpu))


def copy_wheels(
    cluster: Cluster, folder: Path, lock: WheelLock, states: Sequence[InstallState], report: Report
) -> list[WheelCopy]:
    """Send every node the wheels that it lacks: to the head from here, on from there."""
    head, *workers = cluster.nodes
    wanted = {name for state in states for name in state.lacking}
    if not wanted:
        return []
    for_all = [each for each in lock.wheels if each.name in wanted]
    behind = [(number, node) for number, node in enumerate(workers, 1) if states[number].lacking]
    links = _try_links(cluster, [number for number, _node in behind])
    # The head passes on what it need not have for itself.
    over_head = any(not link.error for link in links.values())
    first = for_all if over_head else [each for each in for_all if each.name in states[0].lacking]
    done = []
    if first:
        done += _send_wheels(head, head, folder, states[0].store, first, (), report)

    def forward(entry: tuple[int, Remote]) -> list[WheelCopy]:
        number, node = entry
        its = [each for each in for_all if each.name in states[number].lacking]
        link = links[number]
        source = str(folder) if link.error else states[0].store
        words = () if link.error else link.words
        return _send_wheels(node, head, source, states[number].store, its, words, report)

    for copies in all_of(everywhere(behind, forward)):
        done += copies
    return done


def _try_links(cluster: Cluster, numbers: Sequence[int]) -> Mapping[int, PeerLink]:
    """Return how the head reaches some workers: over the cable, where it has one."""
    if not numbers:
        return {}
    serve = cluster.file.serve
    try:
        addresses = node_addresses(
            cluster.file, cluster.facts(), {"topology": serve.topology, "target": serve.target}
        )
    except HostError:
        addresses = [""] * len(cluster.file.node)  # no cable: as ssh finds its way
    workers = [cluster.file.node[number] for number in numbers]
    links = cluster.try_links(workers, [addresses[number] for number in numbers])
    return dict(zip(numbers, links, strict=True))


def _send_wheels(
    node: Remote,
    head: Remote,
    folder: str | Path,
    store: str,
    wheels: Sequence[NodeWheel],
    link: Sequence[str],
    report: Report,
) -> list[WheelCopy]:
    """Send wheels to a node: from the head over a link, or from here."""
    names = node.call(
        list[str], wheel_store.receive_wheels, wheels=[asdict(each) for each in wheels]
    )
    if not names:
        return []
    source, target = (head if link else Remote("localhost")), store
    words = link or (() if node.here else ssh_words(node.destination, "-o", "ControlMaster=no"))
    answers = source.stream(
        dict[str, Any],
        wheel_store.send_wheels,
        folder=str(folder),
        names=names,
        ssh=list(words[:-2]),
        destination=words[-1] if words else "",
        target=target,
    )
    sent = follow_answers(source, Copied, answers, report(f"{node.destination}: copying"))
    place = source.destination if link else ""
    return [WheelCopy(node=node.destination, source=place, wheels=len(names), sent=sent)]


def install_everywhere(
    cluster: Cluster, lock: WheelLock, states: Sequence[InstallState], report: Report
) -> list[InstalledVenv]:
    """Make the environment on every node and check it there. Raises HostError if they differ."""

    def make(entry: tuple[Remote, InstallState]) -> InstalledVenv:
        node, state = entry
        wanted = {"lock": asdict(lock), "python": state.python}
        answers = node.stream(dict[str, Any], venv_install.install_wheels, **wanted)
        progress = report(f"{node.destination}: installing")
        return follow_answers(node, InstalledVenv, answers, progress)

    made = all_of(everywhere(list(zip(cluster.nodes, states, strict=True)), make))
    if rows := find_differences(made):
        heads = ["", *(each.destination for each in cluster.nodes)]
        raise HostError(
            "what is installed differs from node to node, and nothing was switched:\n"
            + _aligned([heads, *rows]),
            why="one rank would not do what the other does",
            hint="patchkit verify",
        )
    return made


def find_differences(made: Sequence[InstalledVenv]) -> list[list[str]]:
    """Return a row for each thing that is not the same everywhere: its name, and every value."""
    rows: list[tuple[str, list[str]]] = [
        ("python", [each.python for each in made]),
        ("files", [venv.record[:_SHOWN] for venv in made]),
        ("libnccl loaded", [each.nccl for each in made]),
        ("libnccl version", [each.nccl_version for each in made]),
        ("libnccl sha256", [each.nccl_sha256[:_SHOWN] for each in made]),
    ]
    projects = sorted({name for venv in made for name in venv.versions})
    rows += [(name, [venv.versions.get(name, "none") for venv in made]) for name in projects]
    return [[name, *values] for name, values in rows if len(set(values)) > 1]


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def switch_links(cluster: Cluster, names: Sequence[str], *, back: bool = False) -> list[str]:
    """Let every node use an installation, the head first; return what each used before."""

    def change(entry: tuple[Remote, str]) -> str:
        node, name = entry
        its = {"venv": cluster.file.venv, "name": name, "back": back}
        return node.call(str, venv_link.switch_link, **its)

    first, *others = zip(cluster.nodes, names, strict=True)
    return [change(first), *all_of(everywhere(others, change))]


def rollback_target(cluster: Cluster) -> list[str]:
    """Return the installation that each node goes back to. Raises HostError if one has it not.

    Where a switch was cut short some nodes are ahead of others: what all can have is taken.
    """

    def ask(node: Remote) -> VenvLinks:
        return node.call(VenvLinks, venv_link.read_links, venv=cluster.file.venv)

    found = all_of(everywhere(cluster.nodes, ask))
    head = found[0]
    together = len({each.current for each in found}) == 1
    order = [head.former] if together else [head.current, head.former]
    for name in order:
        without = [
            node.destination
            for node, each in zip(cluster.nodes, found, strict=True)
            if name not in (each.current, each.former) or name not in each.whole
        ]
        if name and not without:
            return [name] * len(found)
    names = ", ".join(without) if order[-1] else cluster.head.destination
    raise HostError(
        f"{names}: has no former installation to go back to",
        why="nothing was changed on any node",
        hint="install another wheelhouse: patchkit cluster install --wheelhouse DIR",
    )
