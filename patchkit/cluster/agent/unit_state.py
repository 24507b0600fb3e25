"""Start and stop a cluster's units on a node; say how they are, and what they wrote. Runs there."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchkit.cluster.agent.health import UnreadError, gpu_state, read_kernel_log
from patchkit.cluster.agent.image_facts import REMOVE_WORDS, ImageFacts, find_image
from patchkit.cluster.agent.installation import describe_successor
from patchkit.cluster.agent.node_files import config_folder, run_for_user
from patchkit.cluster.agent.node_troubles import (
    NodeTroubles,
    look_for_troubles,
    own_kills,
)
from patchkit.cluster.agent.processes import (
    Listener,
    find_listeners,
    read_mark,
    strangers,
)
from patchkit.errors import HostError
from patchkit.follow import Follow
from patchkit.foreign import read_json
from patchkit.process import attempt
from patchkit.records import RecordError
from patchkit.runtime.host.host import Memory
from patchkit.runtime.host.machine_root import LIVE, Reader, ToolUnavailable
from patchkit.runtime.host.probe import memory

RUNNING = ("active", "activating")
NAME = re.compile("[a-z][a-z0-9-]*")
LABEL = "patchkit.cluster"
"""The label of a group's containers."""

_LATEST = 1 << 53  # microseconds since 1970: what no clock says
_PATIENCE = 200.0  # seconds for systemd to stop a unit, which kills what does not end
_SETTLES = 10.0  # seconds for the driver to give memory back after the last process
_STARTING = (
    "7d4958e842da4a758f6c1cdc7b36dcc5"  # SD_MESSAGE_UNIT_STARTING of sd-messages.h
)
_SHOWN = {
    "unit": "Id",
    "active": "ActiveState",
    "sub": "SubState",
    "result": "Result",
    "status": "ExecMainStatus",
    "restarts": "NRestarts",
    "since": "StateChangeTimestamp",
    "invocation": "InvocationID",
    "description": "Description",
    "text": "StatusText",
    "job": "Job",
    "drop_ins": "DropInPaths",
    "changed": "NeedDaemonReload",
}  # field of a UnitState → systemd's property


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitState:
    """A unit as systemd shows it; ``since`` is its last change, ``text`` what it says of itself.

    One that cannot start yet, since it needs another one, is ``activating`` and ``waiting``.
    ``drop_ins`` change it; ``changed`` says that systemd has not read its file since it was.
    """

    unit: str
    active: str
    sub: str
    result: str
    status: str
    restarts: int
    since: str
    invocation: str
    description: str
    text: str = ""
    drop_ins: tuple[str, ...] = ()
    changed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """A node's units, the processes that its group has, and its memory in KiB; None: unknown.

    ``starts`` is how often its first unit was started in the last hour, of four at most, since a
    person asked for it or it lost a link. ``strangers`` are who else listens at its server's port;
    ``containers`` are the group's, by name. ``others`` are other clusters of this user that run
    here, by name, True if this is their head. ``start`` is the id of the start whose files are
    here, ``model`` what its head serves, and ``members`` are its nodes, as they were reached from
    where it was started.
    ``successor`` says which installation the next `up` serves from, if that is another one.
    ``image`` has what is wrong with the engine or the image that it serves from, None for nothing.
    ``frozen`` is when and why its server was killed as frozen, the last time within a day.
    """

    units: tuple[UnitState, ...]
    processes: tuple[int, ...]
    starts: int
    memory: Memory | None
    strangers: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    others: Mapping[str, bool] = field(default_factory=dict)
    start: str = ""
    model: str = ""
    members: tuple[str, ...] = ()
    successor: str = ""
    image: ImageFacts | None = None
    frozen: str = ""
    troubles: NodeTroubles = field(default_factory=NodeTroubles)
    celsius: int | None = None
    watts: float | None = None

    @property
    def serves(self) -> bool:
        """Return whether its rank runs, or is about to."""
        return self.units[0].active in RUNNING

    @property
    def left(self) -> str:
        """Return what runs of the group, "" for nothing."""
        if on := [
            unit.unit
            for unit in self.units
            if unit.active not in ("inactive", "failed")
        ]:
            return f"{', '.join(on)} still runs"
        pids = ", ".join(map(str, self.processes))
        if self.containers:
            return f"containers are left: {', '.join(self.containers)}"
        return f"processes are left: {pids}" if pids else ""

    def unit(self, name: str) -> UnitState | None:
        """Return the state of a unit; None for one that was not asked for."""
        return next((unit for unit in self.units if unit.unit == name), None)


def read_node_state(name: str, units: Sequence[str]) -> NodeState:
    """Return the state of this node."""
    gpu = None
    with contextlib.suppress(
        ToolUnavailable
    ):  # a node without nvidia-smi has no figures
        gpu = gpu_state()
    settings = read_settings(name)
    successor, image = look_at_served(settings)
    # A worker's files name no server.
    url = settings.get("url")
    listening = strangers(url, units[0], name) if isinstance(url, str) else []
    states = tuple(unit_states(units))
    return NodeState(
        units=states,
        processes=tuple(process.pid for process in group_processes(name)),
        starts=min(_count_starts(units[0]), states[0].restarts + 1),
        strangers=tuple(listening),
        others=other_clusters(name),
        start=str(settings.get("id", "")),
        model=str(settings.get("model", "")),
        members=tuple(map(str, settings.get("nodes", ()))),
        containers=tuple(find_containers(name)),
        successor=successor,
        image=image,
        frozen=_last_kill_of_watch(units[-1]) if len(units) > 1 else "",
        memory=memory(Reader(LIVE, None)),
        troubles=look_for_troubles(settings),
        celsius=gpu.celsius if gpu else None,
        watts=gpu.watts if gpu else None,
    )


def _count_starts(unit: str) -> int:
    """Return how often a unit was started in an hour, also because a person asked for it."""
    asked = (
        "--since=-1h",
        "--quiet",
        "--no-pager",
        "--output=cat",
        f"_UID={os.getuid()}",
    )
    mine = (f"MESSAGE_ID={_STARTING}", f"USER_UNIT={unit}")
    return len(attempt("journalctl", *asked, *mine).output.splitlines())


def _last_kill_of_watch(unit: str) -> str:
    """Return when and why a watch killed the server as frozen, the last time within a day."""
    last = None
    with contextlib.suppress(
        HostError
    ):  # how the units are is known without their words
        for line in _read_journal([unit], since="-24h", lines=0, follow=False):
            last = line if line.text.startswith("frozen: ") else last
    return (
        time.strftime("%F %T ", time.localtime(last.time / 1e6)) + last.text
        if last
        else ""
    )


def read_settings(name: str) -> dict[str, Any]:
    """Return what the files of a cluster's last start say on this node, {} without any."""
    with contextlib.suppress(OSError, ValueError):
        settings = read_json(
            (config_folder(name) / "group.json").read_text(encoding="utf-8")
        )
        if isinstance(settings, dict):
            return settings
    return {}


def other_clusters(name: str) -> dict[str, bool]:
    """Return which other clusters of this user run here, by name; True if this is their head."""
    folders = Path("/proc").glob("[0-9]*")
    running = {read_mark(folder) for folder in folders if _is_own(folder)}

    # One that waits for its next start has no process.
    placed = [
        file.parent.name for file in config_folder(name).parent.glob("*/group.json")
    ]
    units = [f"patchkit-{other}.service" for other in placed]
    states = unit_states(units) if units else ()
    running |= {
        other
        for other, state in zip(placed, states, strict=True)
        if state.active in RUNNING
    }
    names = sorted(other for other in running - {name} if NAME.fullmatch(other))
    return {other: "url" in read_settings(other) for other in names}


def _is_own(process: Path) -> bool:
    """Return whether a process, by its folder in /proc, is one of this user's."""
    with contextlib.suppress(OSError):  # it ended
        return process.stat().st_uid == os.getuid()
    return False


def look_at_served(settings: Mapping[str, Any]) -> tuple[str, ImageFacts | None]:
    """Return what has become of what a start serves from, environment or image; "" and None."""
    try:
        if "image" in settings:
            image = find_image(settings["inside"][0], [settings["image"]])
            return "", image if image.problem else None
        return describe_successor(settings["link"], settings["venv"]), None
    except (LookupError, TypeError):
        return "", None  # nothing was started here, or by an earlier patchkit


def unit_states(units: Sequence[str]) -> Iterator[UnitState]:
    """Yield the states of units, those that are not there as well. Raises HostError."""
    shown_keys = ",".join(_SHOWN.values())
    done = run_for_user(
        "systemctl", "show", f"--property={shown_keys}", "--", *units, check=True
    )
    for block in done.output.strip().split("\n\n"):
        shown = dict(line.partition("=")[::2] for line in block.splitlines())
        fields: dict[str, Any] = {
            name: shown.get(key, "") for name, key in _SHOWN.items()
        }
        if fields["sub"].startswith("auto-restart"):
            fields["sub"] = (
                "auto-restart"  # systemd 254 has auto-restart-queued beside it
            )
        if fields.pop("job") and fields["sub"] in ("dead", "failed", "auto-restart"):
            fields |= {"active": "activating", "sub": "waiting", "invocation": ""}
        fields["restarts"] = int(fields["restarts"] or 0)
        fields["drop_ins"] = tuple(fields["drop_ins"].split())
        yield UnitState(**{**fields, "changed": fields["changed"] == "yes"})


def find_containers(name: str, *, end: bool = False) -> list[str]:
    """Return the containers of a cluster's group, those that stopped, too; ``end`` removes them."""
    try:
        text = (config_folder(name) / "group.json").read_text(encoding="utf-8")
        program = read_json(text)["inside"][0]
    except (OSError, ValueError, LookupError, TypeError):
        return []  # nothing was started here, or not in a container
    asked = ("ps", "--all", "--format={{.Names}}", f"--filter=label={LABEL}={name}")
    found = attempt(program, *asked).output.split()
    if end and found:
        attempt(program, *REMOVE_WORDS[Path(program).name], *found)
    return found


def follow_units(units: Sequence[str]) -> Iterator[list[UnitState]]:
    """Yield the state of the units at once and whenever it changes, as long as somebody listens."""
    last: list[UnitState] = []
    while True:
        now = list(unit_states(units))
        if now != last:
            yield now
            last = now
        time.sleep(0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProcess:
    """A process with the group's mark; ``state`` is the kernel's letter: R, S, D, T, Z …"""

    pid: int
    name: str
    state: str


def group_processes(name: str) -> Iterator[GroupProcess]:
    """Yield the processes of a cluster's group, orphans that left its control group included."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended
            if _is_own(folder) and read_mark(folder) == name:
                text = (folder / "stat").read_bytes().decode(errors="replace")
                # The name is in parentheses, and may hold some itself.
                before, _, after = text.rpartition(")")
                own = before.partition("(")[2], after.strip()[:1]
                yield GroupProcess(pid=int(folder.name), name=own[0], state=own[1])


def listeners(ports: Collection[int]) -> list[Listener]:
    """Return who listens at these TCP ports, of IPv4 and IPv6; HostError without ss."""
    try:
        return list(find_listeners(ports))
    except FileNotFoundError:
        raise HostError(
            "ss is not installed", hint="sudo apt install iproute2"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalLine:
    """A line of a unit; ``time`` is in microseconds since 1970, by the node's own clock."""

    time: int
    unit: str
    text: str

    def __post_init__(self) -> None:
        if not abs(self.time) < _LATEST:
            raise RecordError(f"is {self.time}, which no clock says", "time")


def read_units(
    units: Sequence[str], since: str = "", lines: int = 0, follow: bool = False
) -> Iterator[JournalLine]:
    """Yield the journal of units of this user, oldest first: on the node.

    ``since`` is as journalctl takes it, ``lines`` how many of the newest, 0 for all. What the
    kernel killed for memory stands between them. Raises HostError where nothing can be read, and
    for a systemd that does not answer.
    """
    if follow:
        list(unit_states(units))  # raises where no systemd would ever write a line

    journal = _read_journal(units, since, lines, follow)
    first = None if follow else next(journal, None)
    if first is None:
        yield from journal
        return

    kernel: Sequence[str] = ()
    with contextlib.suppress(UnreadError):
        kernel = read_kernel_log()
    later = [
        JournalLine(time=at, unit="kernel", text=text)
        for at, text in own_kills(kernel, os.getuid())
        if at >= first.time
    ]
    yield first
    yield from heapq.merge(journal, later, key=lambda line: line.time)


def _read_journal(
    units: Sequence[str], since: str, lines: int, follow: bool
) -> Iterator[JournalLine]:
    words = ["journalctl", "--output=json", "--quiet", "--no-pager"]
    words += [f"--since={since}"] if since else []
    words += [f"--lines={lines}"] if lines else []
    words += ["--follow"] if follow else []
    count = 0
    # A unit's own lines, or systemd's about it; of this user.
    for unit, key in itertools.product(units, ("_SYSTEMD_USER_UNIT", "USER_UNIT")):
        words += [f"{key}={unit}", f"_UID={os.getuid()}", "+"]
    with Follow(*words[:-1], given=()) as talk:
        for line in talk:
            try:
                entry = read_json(line)
                unit = str(entry.get("_SYSTEMD_USER_UNIT") or entry["USER_UNIT"])
                at = int(entry["__REALTIME_TIMESTAMP"])
            except (ValueError, KeyError, TypeError):
                continue  # not an entry of a unit
            text = entry.get("MESSAGE")
            # What is no UTF-8 is a list of bytes, and of a line that is too long there is nothing.
            if isinstance(text, list):
                octets = bytes(each & 255 for each in text if isinstance(each, int))
                text = octets.decode(errors="replace")
            count += 1
            yield JournalLine(
                time=at, unit=unit, text=text if isinstance(text, str) else ""
            )

    if talk.done.trouble:
        raise HostError(
            f"journalctl: {talk.done.trouble}", hint="journalctl --user --lines=5"
        )
    if not count:
        list(unit_states(units))  # raises where no systemd wrote any


def begin_group(name: str) -> str:
    """Start a group's head, on the head, and let it come back at a boot; do not wait for it.

    Returns the time there, for its journal. Raises HostError.
    """
    now, unit = f"@{time.time():.6f}", f"patchkit-{name}.service"
    # What failed before does not count towards the limit of a start that a person asks for.
    run_for_user("systemctl", "reset-failed", unit)
    run_for_user("systemctl", "enable", "--quiet", unit, check=True)
    run_for_user("systemctl", "restart", "--no-block", unit, check=True)
    return now


def begin_unit(unit: str) -> None:
    """Start a unit that has ended; do not wait for it. Raises HostError."""
    run_for_user("systemctl", "reset-failed", unit)
    run_for_user("systemctl", "start", "--no-block", unit, check=True)


def end_start(name: str, start: str) -> str:
    """Stop and disable what a start left on a node that its cluster does not have any more.

    Returns what still runs of it. Files of another start are not touched.
    """
    if read_settings(name).get("id") != start:
        return ""
    return end_group(name, [f"patchkit-{name}.service"], disable=True).left


def end_group(name: str, units: list[str], disable: bool) -> NodeState:
    """Stop a node's units, wait until the group has no process and its memory is back: there.

    A node that was the head of the former start has more of them than a worker's ``units``.
    """
    watches = f"patchkit-{name}-worker@*.service"
    helpers = [
        watches,
        *(f"patchkit-{name}-{part}.service" for part in ("ray", "alive")),
    ]
    running = [its.unit for its in unit_states(units) if its.active != "inactive"]
    if disable:
        run_for_user("systemctl", "disable", "--quiet", units[0])
    run_for_user(
        "systemctl", "stop", f"patchkit-{name}-hold.service", timeout=_PATIENCE
    )
    done = run_for_user("systemctl", "stop", *(running or units[:1]), timeout=_PATIENCE)
    # A unit that was never there is stopped.
    if done.trouble and "not loaded" not in done.errors:
        raise done.error(hint="systemctl --user status")
    run_for_user("systemctl", "stop", *helpers, timeout=_PATIENCE)
    # Each by itself: one that is not loaded would end the others' turn.
    for unit in (*units, *helpers):
        run_for_user("systemctl", "reset-failed", unit)
    find_containers(name, end=True)  # such as an engine's that was restarted meanwhile
    _wait_until_settled(name)
    return read_node_state(name, units)


def _wait_until_settled(name: str) -> None:
    """Wait until a group has no process and its memory is back, or for some seconds."""
    deadline = time.monotonic() + _SETTLES
    last = -1
    while time.monotonic() < deadline:
        room = memory(Reader(LIVE, None))
        free = room.available if room else 0
        is_settled = free <= last >= 0
        if is_settled and not any(group_processes(name)):
            return
        last = free
        time.sleep(0.5)
