"""Read the state of a cluster's group on a node; start the group, and end it. Runs on the node.

The states and the journal of the group's units are as systemd shows them to this node's user.
"""

import heapq
import json
import os
import re
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from patchkit.cluster.agent.fingerprint import last_judgement
from patchkit.cluster.agent.group_script import ALONE
from patchkit.cluster.agent.health import (
    GpuState,
    NodeTroubles,
    UnreadError,
    gpu_state,
    look_for_troubles,
    own_kills,
    read_kernel_log,
)
from patchkit.cluster.agent.image_facts import ENGINES, ImageFacts, find_image
from patchkit.cluster.agent.installation import describe_successor
from patchkit.cluster.agent.memory_record import MemoryStop, read_stop, read_turn
from patchkit.cluster.agent.node_files import config_folder, run_for_user
from patchkit.cluster.agent.processes import (
    Listener,
    Process,
    find_listeners,
    read_mark,
    read_processes,
    strangers,
)
from patchkit.cluster.ssh.ssh import TOOLS
from patchkit.errors import HostError
from patchkit.follow import Follow
from patchkit.foreign import clock_text, positive_number, read_json
from patchkit.frozen import Fields, Texts, Values, frozen
from patchkit.process import attempt
from patchkit.records import RecordError, read_toml
from patchkit.runtime.host.host import Memory
from patchkit.runtime.host.probe import LIVE, Reader, ToolUnavailable, read_memory
from patchkit.units import KIB_PER_GIB

NAME = re.compile("[a-z][a-z0-9-]*")
LABEL = "patchkit.cluster"
"""The label of a group's containers."""

_PATIENCE = 200.0  # seconds in which systemd stops a unit, or else kills it
_SETTLES = 10.0  # seconds in which the driver gives back a process's memory
_STEP = re.compile(r"\[(\d+)/(\d+)\] ")  # of ninja
_LEFT_GIB = 8  # for all but compilers: the GPU of a GB10 takes its memory from the same
_LINES = 200  # that are sent of a failure
# SD_MESSAGE_UNIT_STARTING of sd-messages.h
_STARTING = "7d4958e842da4a758f6c1cdc7b36dcc5"


RUNNING = ("active", "activating")
OFF = ("inactive", "failed")
"""Values of ``UnitState.active``: RUNNING if a unit runs or starts, OFF if it does not run."""

_STUCK = (
    "dead",
    "failed",
    "auto-restart",
)  # sub-states in which a unit with a job waits for another unit
# Field of a UnitState → systemd's property.
_PROPERTIES = read_toml(dict[str, str], TOOLS, key="properties")


@frozen
class UnitState:
    """The state of a unit, in systemd's words.

    ``since`` is the time of its last change, ``text`` the status line that it gave systemd.
    ``invocation`` is the id of the run, "" if there is none. A unit that cannot start before
    another unit runs is "activating" and "waiting": systemd has no word for that. ``drop_ins`` are
    files that change the unit; ``changed`` says that its file is newer than what systemd has read.
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
    text: str
    drop_ins: Texts
    changed: bool


def unit_states(units: Sequence[str]) -> Iterator[UnitState]:
    """Yield the states of units, in their order, also of units that do not exist.

    Raises HostError if systemd does not answer.
    """
    properties = ",".join(_PROPERTIES.values())
    words = ("show", f"--property={properties}", "--", *units)
    shown = run_for_user("systemctl", *words, check=True).output

    for block in shown.strip().split("\n\n"):
        yield _read_unit(block)


def _read_unit(block: str) -> UnitState:
    """Return the state of a unit from a block of lines PROPERTY=VALUE."""
    values = dict(line.partition("=")[::2] for line in block.splitlines())
    fields: Fields = {name: values.get(key, "") for name, key in _PROPERTIES.items()}

    if fields["sub"].startswith("auto-restart"):
        fields["sub"] = "auto-restart"  # systemd 254 has auto-restart-queued as well

    has_job = fields.pop("job")
    if has_job and fields["sub"] in _STUCK:
        fields.update(
            active="activating",
            sub="waiting",
            invocation="",
        )

    fields["restarts"] = int(fields["restarts"] or 0)
    fields["drop_ins"] = tuple(fields["drop_ins"].split())
    fields["changed"] = fields["changed"] == "yes"
    return UnitState(**fields)


def follow_units(units: Sequence[str]) -> Iterator[list[UnitState]]:
    """Yield the states of units now, and again at each change, without an end.

    Raises HostError if systemd does not answer.
    """
    former: list[UnitState] = []
    while True:
        states = list(unit_states(units))
        if states != former:
            yield states
            former = states
        time.sleep(0.25)


def begin_unit(unit: str) -> None:
    """Start a unit that has ended; do not wait for it. Raises HostError."""
    run_for_user("systemctl", "reset-failed", unit)
    run_for_user("systemctl", "start", "--no-block", unit, check=True)


_LATEST = 1 << 53  # microseconds since 1970: later than any clock


@frozen
class JournalLine:
    """A line of a unit; ``time`` is in microseconds since 1970, by the node's own clock."""

    time: int
    unit: str
    text: str

    def __post_init__(self) -> None:
        if not abs(self.time) < _LATEST:
            raise RecordError(f"is {self.time}, which no clock says", "time")


NodeLine = tuple[str, JournalLine]
"""The name of a node, and a line of its journal."""


def read_units(
    units: Sequence[str],
    since: str = "",
    lines: int = 0,
    follow: bool = False,
) -> Iterator[JournalLine]:
    """Yield the journal of units, oldest first, and the kernel's kills for memory among it.

    ``since`` is as journalctl takes it, ``lines`` is how many of the newest are read, 0 for all.
    With ``follow`` new lines are waited for, and the kernel's kills are left out; without it, kills
    before the oldest line are. Raises HostError if journalctl fails, or systemd does not answer.
    """
    if follow:
        # Raises HostError without a systemd: no line would ever come.
        list(unit_states(units))

    journal = read_journal(units, since, lines, follow)
    oldest = None if follow else next(journal, None)
    if oldest is None:
        yield from journal
        return

    kernel: Sequence[str] = ()
    with suppress(UnreadError):
        kernel = read_kernel_log()
    kills = [
        JournalLine(
            time=moment,
            unit="kernel",
            text=text,
        )
        for moment, text in own_kills(kernel, os.getuid())
        if moment >= oldest.time
    ]
    yield oldest
    yield from heapq.merge(journal, kills, key=lambda line: line.time)


def read_journal(
    units: Sequence[str],
    since: str,
    lines: int = 0,
    follow: bool = False,
) -> Iterator[JournalLine]:
    """Yield the journal of units as ``read_units`` does, without the kernel's kills."""
    words = ["journalctl", "--output=json", "--quiet", "--no-pager"]
    if since:
        words.append(f"--since={since}")
    if lines:
        words.append(f"--lines={lines}")
    if follow:
        words.append("--follow")
    # Lines of a unit, or of systemd about the unit; both of this user. "+" means "or".
    for unit in units:
        for key in ("_SYSTEMD_USER_UNIT", "USER_UNIT"):
            words += [f"{key}={unit}", f"_UID={os.getuid()}", "+"]

    count = 0
    with Follow(*words[:-1], given=()) as journal:
        for text in journal:
            if line := _read_entry(text):
                count += 1
                yield line

    if journal.done.trouble:
        hint = "journalctl --user --lines=5"
        raise HostError(f"journalctl: {journal.done.trouble}", hint=hint)
    if not count:
        # Raises HostError if there is no line because there is no systemd.
        list(unit_states(units))


def _read_entry(text: str) -> JournalLine | None:
    """Return the line in an entry of `journalctl --output=json`; None for one without a unit."""
    try:
        entry = read_json(text)
        unit = str(entry.get("_SYSTEMD_USER_UNIT") or entry["USER_UNIT"])
        moment = int(entry["__REALTIME_TIMESTAMP"])
    except (ValueError, KeyError, TypeError):
        return None

    message = entry.get("MESSAGE")
    # A message that is not UTF-8 is a list of numbers; one that is too long is left out.
    if isinstance(message, list):
        octets = bytes(number & 255 for number in message if isinstance(number, int))
        message = octets.decode(errors="replace")
    return JournalLine(
        time=moment,
        unit=unit,
        text=message if isinstance(message, str) else "",
    )


@frozen
class NodeState:
    """The state of a cluster's group on a node.

    ``units`` begins with the unit of the rank; ``processes`` are the numbers of the group's
    processes, ``containers`` the names of its containers. ``starts`` is how often systemd started
    the rank's unit in the last hour: after four it gives up; a start by a person or after a lost
    link begins the count anew. ``memory`` is in KiB, None if unknown, as ``celsius`` and ``watts``
    of the GPU. ``strangers`` are other programs that listen at the server's port. ``others`` are
    other clusters of this user that run here, by name: True if this node is their head, and
    ``to_come`` the GiB that they have yet to take, since they load or wait for that.

    ``start`` is the id of the start whose files are here, ``model`` what its head serves;
    ``members`` are the SSH destinations of its nodes at the time of that start. ``successor``
    describes the installation that the next `up` serves from, "" if it is the same. ``image`` has
    the problem of the engine or of the image that the start uses, None for no problem. ``frozen``
    is when and why the watch last killed the server, within a day, ``memory_stop`` the last kill of
    this start for memory, and ``memory_floor`` the GiB below which it happens, 0 for never.
    ``answers`` is how the model's answers were judged last, "" for never.
    """

    units: tuple[UnitState, ...]
    processes: tuple[int, ...]
    starts: int
    memory: Memory | None
    strangers: Texts
    containers: Texts
    others: Mapping[str, bool]
    start: str
    model: str
    members: Texts
    successor: str
    image: ImageFacts | None
    frozen: str
    memory_stop: MemoryStop | None
    memory_floor: float
    troubles: NodeTroubles
    celsius: int | None
    watts: float | None
    answers: str = ""
    to_come: float = 0.0

    @property
    def serves(self) -> bool:
        """Return whether the rank runs, or is being started."""
        return self.units[0].active in RUNNING

    @property
    def left(self) -> str:
        """Return in words what still runs of the group, "" for nothing."""
        running = [unit.unit for unit in self.units if unit.active not in OFF]
        if running:
            return f"{', '.join(running)} still runs"
        if self.containers:
            return f"containers are left: {', '.join(self.containers)}"
        if self.processes:
            return f"processes are left: {', '.join(map(str, self.processes))}"
        return ""

    def unit(self, name: str) -> UnitState | None:
        """Return the state of the unit ``name``, None if ``units`` does not have it."""
        return next((unit for unit in self.units if unit.unit == name), None)


def read_node_state(name: str, units: Sequence[str]) -> NodeState:
    """Return the state of the cluster ``name`` on this node.

    ``units`` are the names of its units here, the rank's first; on the head the unit that watches
    the server is last. Raises HostError if systemd does not answer.
    """
    gpu = GpuState(celsius=None, watts=None)
    with suppress(ToolUnavailable):  # nvidia-smi is missing
        gpu = gpu_state()

    settings = read_settings(name)
    successor, image = look_at_served(settings)
    # Only the head's settings have the URL of a server.
    url = settings.get("url")
    listeners = strangers(url, units[0], name) if isinstance(url, str) else []
    states = tuple(unit_states(units))
    memory = read_memory(Reader(LIVE))
    others = other_clusters(name)
    start = str(settings.get("id", ""))
    model = str(settings.get("model", ""))

    # The starts within an hour, by systemd or by a person.
    words = ("--since=-1h", "--quiet", "--no-pager", "--output=cat")
    matches = (f"MESSAGE_ID={_STARTING}", f"USER_UNIT={units[0]}")
    journal = attempt("journalctl", *words, f"_UID={os.getuid()}", *matches)
    starts = len(journal.output.splitlines())
    return NodeState(
        units=states,
        processes=tuple(process.pid for process in group_processes(name)),
        starts=min(starts, states[0].restarts + 1),
        strangers=tuple(listeners),
        others=others,
        start=start,
        model=model,
        members=tuple(map(str, settings.get("nodes", ()))),
        containers=tuple(find_containers(name)),
        successor=successor,
        image=image,
        frozen=_last_kill_of_watch(units[-1]),
        memory_stop=read_stop(name, start),
        memory_floor=positive_number(settings.get("floor")),
        memory=memory,
        to_come=memory_to_come(others, memory.available if memory else 0),
        troubles=look_for_troubles(settings),
        celsius=gpu.celsius,
        watts=gpu.watts,
        answers=last_judgement(name, model),
    )


def _last_kill_of_watch(unit: str) -> str:
    """Return when and why a watch last killed the server within a day, "" if it did not."""
    kill = ""
    # Without a journal the rest of the state is still of use.
    with suppress(HostError):
        for line in read_journal([unit], since="-24h"):
            if line.text.startswith("frozen: "):
                kill = f"{clock_text(line.time / 1e6)} {line.text}"
    return kill


def read_settings(name: str) -> Fields:
    """Return the content of ``group.json`` of a cluster's last start here, {} if there is none."""
    with suppress(OSError, ValueError):
        file = config_folder(name) / "group.json"
        settings = read_json(file.read_text(encoding="utf-8"))
        if isinstance(settings, dict):
            return settings
    return {}


def other_clusters(name: str) -> dict[str, bool]:
    """Return the other clusters of this user that run here, by name: True on their head."""
    own = [process.pid for process in read_processes() if process.user == os.getuid()]
    running = set(map(read_mark, own))

    # A cluster without a process may still run: its unit waits for the next start.
    files = config_folder(name).parent.glob("*/group.json")
    placed = [file.parent.name for file in files]
    units = [f"patchkit-{cluster}.service" for cluster in placed]
    states = unit_states(units) if units else ()
    pairs = zip(placed, states, strict=True)
    running |= {cluster for cluster, state in pairs if state.active in RUNNING}

    names = sorted(filter(NAME.fullmatch, running - {name}))
    return {cluster: "url" in read_settings(cluster) for cluster in names}


def memory_to_come(names: Collection[str], free: int) -> float:
    """Return the GiB that clusters on this node have yet to take; ``free`` KiB are left now.

    One that loads has noted what it leaves. One that waits, for memory or for its next start, takes
    all of its plan.
    """
    total = 0.0
    for name in names:
        plan = read_settings(name).get("memory")
        takes = positive_number(plan.get("takes")) if isinstance(plan, dict) else 0.0
        turn = read_turn(name)
        if turn and time.monotonic() < turn[1]:
            total += min(max(free - turn[0], 0) / KIB_PER_GIB, takes)
        elif takes and _waits(name):
            total += takes
    return total


def _waits(name: str) -> bool:
    """Return whether the rank of a cluster is about to start on this node."""
    [rank] = unit_states([f"patchkit-{name}.service"])
    return rank.sub in ("waiting", "auto-restart")


def look_at_served(settings: Fields) -> tuple[str, ImageFacts | None]:
    """Return ``successor`` and ``image`` of a NodeState for the settings of a start.

    A start in containers has no successor, any other start has no image.
    """
    try:
        if "image" in settings:
            image = find_image(settings["inside"][0], [settings["image"]])
            return "", image if image.problem else None
        return describe_successor(settings["link"], settings["venv"]), None
    except (LookupError, TypeError):
        return "", None  # nothing was started here, or an earlier patchkit did it


def find_containers(name: str, *, end: bool = False) -> list[str]:
    """Return the names of a group's containers, also of stopped ones; ``end`` removes them."""
    try:
        program = read_settings(name)["inside"][0]
    except (LookupError, TypeError):
        return []  # nothing was started here, or not in a container

    words = ("ps", "--all", "--format={{.Names}}", f"--filter=label={LABEL}={name}")
    containers = attempt(program, *words).output.split()
    if end and containers:
        attempt(program, *ENGINES[Path(program).name].remove, *containers)
    return containers


def group_processes(name: str) -> Iterator[Process]:
    """Yield the processes with the mark of a cluster, also those outside of its control group."""
    for process in read_processes():
        if process.user == os.getuid() and read_mark(process.pid) == name:
            yield process


def listeners(ports: Collection[int]) -> list[Listener]:
    """Return the listeners at these TCP ports, of IPv4 and IPv6. Raises HostError without ss."""
    try:
        return list(find_listeners(ports))
    except FileNotFoundError:
        hint = "sudo apt install iproute2"
        raise HostError("ss is not installed", hint=hint) from None


def begin_group(name: str) -> str:
    """Start the head of a group, which is on this node, now and at each boot; do not wait for it.

    Returns the time before the start, "@SECONDS" since 1970, for the journal. Raises HostError.
    """
    now = f"@{time.time():.6f}"
    unit = f"patchkit-{name}.service"

    # A start by a person does not count with earlier failures towards systemd's limit.
    run_for_user("systemctl", "reset-failed", unit)
    run_for_user("systemctl", "enable", "--quiet", unit, check=True)
    run_for_user("systemctl", "restart", "--no-block", unit, check=True)
    return now


def compile_modules(
    name: str,
    python: str,
    script: str,
    calls: list[Fields],
    variables: Values,
    by_memory: bool,
) -> Generator[tuple[int, int], None, tuple[bool, list[str]]]:
    """Let ``python`` run ``script``, which compiles modules of FlashInfer: ``calls`` is its input.

    Yields how many of ninja's steps are done, and all. With ``by_memory``, as many compilers run at
    once as memory holds, else as many as FlashInfer and ``variables`` say. If the caller ends it
    early, the next run goes on. Returns whether all is compiled, with what the workers of the
    cluster ``name`` got, or else with what ninja and the script said. Workers that got nothing
    compile for themselves.
    """
    memory = read_memory(Reader(LIVE))
    free_gib = memory.available / KIB_PER_GIB - _LEFT_GIB if memory else 0
    cores = len(os.sched_getaffinity(0))
    for call in calls if by_memory else ():
        call["jobs"] = max(1, min(cores, int(free_gib / call["gib"])))

    lines = []
    with Follow(
        python,
        "-c",
        script,
        env={**os.environ, **variables},
        cwd=Path("/"),
        given=[json.dumps(calls).encode()],
    ) as running:
        for line in running:
            if step := _STEP.match(line):
                yield int(step[1]), int(step[2])
            else:
                lines.append(line)

    done = running.done
    if done.trouble:
        # "exit code 1: its output"
        outcome, _colon, output = done.trouble.partition(": ")
        last_line = output.rpartition("\n")[2]
        lines += [*done.errors.splitlines(), f"{python} {outcome}: {last_line}"]
        return False, lines[-_LINES:]

    # Copy the head's caches of compiled code to the workers, without a wait for new files.
    group = config_folder(name) / "group.py"
    copied = attempt("/usr/bin/python3", ALONE, group, "spread", "0", timeout=90)
    return True, copied.output.splitlines()


def end_start(name: str, start: str) -> str:
    """Stop and disable the start ``start`` on this node, which its cluster does not have any more.

    Returns in words what still runs, "" for nothing. Does nothing if the files are of another
    start. Raises HostError.
    """
    if read_settings(name).get("id") != start:
        return ""
    return end_group(name, [f"patchkit-{name}.service"], disable=True).left


def end_group(
    name: str,
    units: list[str],
    disable: bool,
) -> NodeState:
    """Stop a group on this node; wait until it has no process and its memory is free again.

    ``units`` are the units that the node has in the present start; helpers of a head are stopped
    as well, since the node may have been the head of a former start. With ``disable`` the group
    does not come back at a boot. Returns the state after it. Raises HostError if systemd fails.
    """
    hold = f"patchkit-{name}-hold.service"
    parts = ("worker@*", "memory", "alive")
    helpers = [f"patchkit-{name}-{part}.service" for part in parts]
    running = [unit.unit for unit in unit_states(units) if unit.active != "inactive"]

    if disable:
        run_for_user("systemctl", "disable", "--quiet", units[0])
    run_for_user("systemctl", "stop", hold, timeout=_PATIENCE)
    stopped = running or units[:1]
    done = run_for_user("systemctl", "stop", *stopped, timeout=_PATIENCE)
    # systemctl fails for a unit that does not exist: that is as good as stopped.
    if done.trouble and "not loaded" not in done.errors:
        raise done.error(hint="systemctl --user status")
    run_for_user("systemctl", "stop", *helpers, timeout=_PATIENCE)

    # One call for each unit: systemctl ends at the first unit that is not loaded.
    for unit in (*units, *helpers):
        run_for_user("systemctl", "reset-failed", unit)
    find_containers(name, end=True)  # a restart of the engine may have left some
    _wait_until_settled(name)
    return read_node_state(name, units)


def _wait_until_settled(name: str) -> None:
    """Wait until a group has no process and no more memory becomes free, or ``_SETTLES``."""
    deadline = time.monotonic() + _SETTLES
    former = -1
    while time.monotonic() < deadline:
        room = read_memory(Reader(LIVE))
        free = room.available if room else 0
        is_settled = free <= former >= 0
        if is_settled and not any(group_processes(name)):
            return
        former = free
        time.sleep(0.5)
