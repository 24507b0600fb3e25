"""End a rank by its control group, with the words why; read such a record from a hostile disk."""

import json
import math
import os
import pwd
import re
import select
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from patchkit.cluster.agent import memory_script, memory_trigger
from patchkit.cluster.agent.memory_record import (
    BOOT,
    last_figures,
    open_record,
    put_record,
    read_stop,
    record_path,
)
from patchkit.cluster.agent.memory_script import (
    MemoryGuard,
    ProcessSizes,
    describe_growth,
)
from patchkit.cluster.agent.memory_trigger import MemoryReader, Trigger
from patchkit.cluster.agent.processes import Process, read_mark

GIB = 1 << 20  # in KiB
EVERYTHING = 1 << 20  # GiB: always more than is left
HOG = "import sys, time; kept = bytearray(b'x') * (300 << 20); print(1, flush=True); time.sleep(99)"
STOP = {"start": "a", "time": 1.0, "text": "b", "missing": 2.0, "after": ""}

CHANNELS = []


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(memory_script, "_TURN", str(tmp_path))
    mask = os.umask(0o002)
    yield tmp_path
    os.umask(mask)
    while CHANNELS:
        CHANNELS.pop().close()


@pytest.fixture
def group(monkeypatch):
    """A control group of its own, in which the guard finds the rank."""
    tops = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
    top = next((top for top in tops if (top / "cgroup.controllers").exists()), None)
    if top is None or not os.access(top, os.W_OK):
        pytest.skip("no control group of version 2 can be made here (root)")
    path = top / f"patchkit-test-{os.getpid()}"
    path.mkdir()
    monkeypatch.setattr(memory_script, "GROUPS", top)
    yield path
    deadline = time.monotonic() + 5
    while (path / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    path.rmdir()


def rank_in(group, *words):
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    (group / "cgroup.procs").write_text(str(process.pid))
    return process


def guard_with(floor, *groups, takes=0.0, free=0.0, **settings):
    names = {"name": "x", "unit": "x.service", "id": "abc"}
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memory = {"takes": takes, "free": free}
    guard = MemoryGuard({**names, "floor": floor, "memory": memory, **settings}, near)
    guard.trigger = Trigger(guard.floor, guard.mark, far)
    CHANNELS.extend((near, far, guard.trigger._docker))
    guard._paths.update(groups)
    return guard


def let_nothing_be_enough(guard):
    for process in (guard, guard.trigger):
        process.floor = process.mark = EVERYTHING * GIB


def listener(told):
    """Return a systemd that hears states."""
    return lambda state, *files: files or told.append(state)


def look(guard):
    """Let the guard look, then its trigger, which is another process elsewhere."""
    guard.look()
    while select.select([guard.trigger._channel], [], [], 0)[0]:
        guard.trigger.receive()
    guard.trigger.look()
    guard.wait()


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_rank_is_ended_below_the_floor_and_never_above_it(
    group, monkeypatch, capsys, is_writable
):
    """With a list of processes alone, as for docker's containers, each of them gets SIGKILL."""
    if not is_writable:
        monkeypatch.setattr(memory_script.os, "open", without(os.open, "cgroup.kill"))
    with rank_in(group, "sleep", "99") as rank, rank_in(group, "sleep", "99") as other:
        guard = guard_with(0.001, group)
        for _ in range(3):
            look(guard)
        assert (rank.poll(), other.poll(), read_stop("x", "abc")) == (None, None, None)

        let_nothing_be_enough(guard)
        look(guard)
        assert (rank.wait(5), other.wait(5)) == (-9, -9)
        stop = read_stop("x", "abc")
        assert "GiB left, memory_floor is 1048576.0" in stop.text
        assert stop.text in capsys.readouterr().out
        assert (stop.start, stop.missing > 1 << 19) == ("abc", True)

        guard.look()  # what has ended is ended once
        assert read_stop("x", "abc") == stop
    mode = record_path("x", "json").stat().st_mode
    assert (
        stat.S_IMODE(mode),
        record_path("x", "json").parent.stat().st_mode & 0o77,
    ) == (0o600, 0)


GUARD = """
import json, sys
from pathlib import Path
from patchkit.cluster.agent import memory_record, memory_script

groups, turn, settings = sys.argv[1:]
memory_script.GROUPS = memory_record.GROUPS = Path(groups)
memory_script._TURN = turn
memory_script.guard(json.loads(settings))
"""


@contextmanager
def running_guard(group, home, floor, groups=None):
    """Run a guard in a group beside the rank's, as systemd does, with settings without a plan."""
    own = group.with_name(f"{group.name}-guard")
    own.mkdir()
    memory = {"takes": 0.0, "free": 0.0}
    names = {"name": "x", "unit": group.name, "id": "abc"}
    settings = {**names, "floor": floor, "memory": memory}
    words = (GUARD, str(groups or group.parent), str(home), json.dumps(settings))
    script = f'echo $$ > {own}/cgroup.procs; exec "$0" -c "$@"'
    with subprocess.Popen(
        ["sh", "-c", script, sys.executable, *words], stdout=subprocess.PIPE, text=True
    ) as guard:
        try:
            yield guard
        finally:
            guard.terminate()
    own.rmdir()


def test_the_process_that_ends_a_rank_is_the_guards_child(home, group):
    with rank_in(group, "sleep", "99") as rank:
        with running_guard(group, home, 0.001) as guard:
            children = Path(f"/proc/{guard.pid}/task/{guard.pid}/children")
            wait_until(lambda: record_path("x", BOOT.read_text().strip()).exists())
            os.kill(int(children.read_text()), 9)
            text, _errors = guard.communicate(timeout=20)
            assert text.endswith(
                "the process that ends the rank is gone: it was killed\n"
            )
            assert (guard.returncode, rank.poll()) == (1, None)

        with running_guard(group, home, EVERYTHING / 4):
            assert rank.wait(20) == -9
            wait_until(lambda: read_stop("x", "abc"))


def test_a_guard_that_could_end_nothing_says_so(home, group):
    """On a machine with control groups of version 1, or hybrid, the top has no such list."""
    with running_guard(group, home, 2, home) as guard:
        text, _errors = guard.communicate(timeout=20)
    assert (guard.returncode, "control groups are of version 1" in text) == (1, True)


def test_a_trigger_that_fails_tells_the_guard_why(monkeypatch, capsys):
    told = []
    monkeypatch.setattr(memory_script, "notify", listener(told))
    monkeypatch.setattr(memory_trigger, "_LEFT", re.compile(b"no such line"))
    channel = memory_trigger.start_trigger(2 * GIB, 4 * GIB)
    CHANNELS.append(channel)
    assert select.select([channel], [], [], 60)[0]  # it fails, and says why

    guard = guard_with(2)
    guard._trigger = channel
    with pytest.raises(SystemExit, match="1"):
        guard.wait()
    assert told[-1].startswith("STATUS=the guard does not run: the process that ends")
    assert "is gone: AssertionError" in capsys.readouterr().out


def wait_until(holds):
    deadline = time.monotonic() + 20
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert holds()


def without(open_file, name):
    """Return an `open` that is refused a file of this name, as a user is one of root's."""

    def refuse(path, *more):
        if Path(path).name == name:
            raise PermissionError
        return open_file(path, *more)

    return refuse


def test_another_group_of_the_same_name_is_the_next_start(group):
    """systemd removes the group of a unit that ended, and makes one for its next start."""
    guard = guard_with(EVERYTHING, group)
    look(guard)
    group.rmdir()
    group.mkdir()
    with rank_in(group, "sleep", "99") as rank:
        guard.trigger.look()
        assert rank.poll() is None
        look(guard)
        assert rank.wait(5) == -9


def test_a_start_in_the_group_of_the_former_one_is_ended_too(group, monkeypatch):
    """systemd keeps a group in which a process hangs: it is that of the next start."""
    memory = memory_trigger.MemoryLeft(GIB, False)
    monkeypatch.setattr(MemoryReader, "read", lambda _: memory)
    guard = guard_with(2, group)
    for _ in range(2):
        with rank_in(group, "sleep", "99") as rank:
            memory = memory_trigger.MemoryLeft(99 * GIB, False)
            look(guard)
            assert rank.poll() is None
            memory = memory_trigger.MemoryLeft(GIB, False)
            look(guard)
            assert rank.wait(5) == -9


def test_figures_are_on_the_disk_and_say_that_systemd_ended_the_guard():
    guard = guard_with(0.001)
    look(guard)
    guard.finish()
    moment, left, has_ended = last_figures("x", BOOT.read_text().strip())
    assert abs(moment - time.time()) < 5
    assert (left > 0, has_ended) == (True, True)


def test_soon_after_a_boot_it_can_say_who_grew(monkeypatch):
    monkeypatch.setattr(memory_script.time, "monotonic", lambda: 3.0)
    guard = guard_with(0.001)
    guard.look()
    assert "grew" in guard._describe(MemoryReader().read())


def test_the_one_who_grew_is_named(group, tmp_path):
    # With a name of its own: the growth of all processes of a program counts together.
    program = tmp_path / "hog"
    program.symlink_to(sys.executable)
    guard = guard_with(0.001)
    guard.look_at_processes(MemoryReader().read())
    guard.look_at_processes(MemoryReader().read())
    with rank_in(group, program, "-c", HOG) as hog:
        hog.stdout.readline()
        guard.look_at_processes(MemoryReader().read())
        text = describe_growth([guard._looks[0]], guard._looks[-1])
        hog.kill()
    user = memory_script._user_names()[os.getuid()]
    assert f"hog (process {hog.pid} of {user}) grew by 0.3" in text


SOON = (10, {9: 1, 10: 1})


@pytest.mark.parametrize(
    ("soon", "now", "text"),
    [
        (SOON, (2, {9: 1, 10: 6}), "vllm (process 10 of root) grew by 5.0 GiB in 8 s"),
        (SOON, (2, {9: 1, 10: 2}), "memory of no process, as a GPU's, grew by 7.0 GiB"),
        # A crowd, of which each grew by little; and one whose processes are new.
        (SOON, (2, {9: 4, 10: 4, 11: 3}), "vllm (3 processes of root) grew by 9.0 GiB"),
        (SOON, (9, {11: 1.4, 12: 1.5}), "vllm (process 12 of root) grew by 0.9 GiB"),
        # What grew slowly is told by the look that is longer ago.
        ((9, {9: 3}), (9, {9: 3}), "vllm (process 9 of root) grew by 2.0 GiB in 40 s"),
        ((9, {9: 1}), (9, {9: 1}), "memory of no process, as a GPU's, grew by 3.0 GiB"),
        (
            (12, {9: 1}),
            (12, {9: 1}),
            "0.00 GiB less than 40 s before, and no process grew",
        ),
    ],
)
def test_growth_is_of_a_program_or_of_no_process(soon, now, text):
    def look(at, left, sizes):
        processes = [
            Process(pid, "vllm", "S", 0, int(gib * GIB)) for pid, gib in sizes.items()
        ]
        return ProcessSizes(at, left * GIB, processes)

    looks = [look(33.0, *soon), look(1.0, 12, {9: 1})]
    assert describe_growth(looks, look(41.0, *now)).startswith(text)


def test_a_rank_waits_for_the_memory_that_it_needs(home, group, monkeypatch, capsys):
    """systemd starts it once the guard is ready; beside a rank that runs, the guard is at once."""
    told = []
    monkeypatch.setattr(memory_script, "notify", listener(told))

    def tell(**settings):
        told.clear()
        guard = guard_with(0.001, group, **settings)
        look(guard)
        guard._end_turn()
        return guard, told[:]

    started = ["READY=1\nSTATUS="]
    assert tell(takes=0.01)[1] == started
    guard, (waits,) = tell(takes=EVERYTHING)
    assert waits.startswith("STATUS=the start waits for memory: ")
    assert re.search(
        r" \d+\.\d GiB are left, 1048576\.0 needed; .+ has \d+\.\d$", waits
    )

    guard._wait_ends = 0.0
    guard.look()
    assert told[1:] == started
    assert "starts without the memory that it needs" in capsys.readouterr().out

    # Little memory of a rank that runs is another line of the journal.
    guard.mark = EVERYTHING * GIB
    guard._noted_at = 0.0
    guard.look()
    assert "little memory: " in capsys.readouterr().out

    # What the next start takes less, it need not wait for.
    monkeypatch.setenv("PATCHKIT_MISSING", str(EVERYTHING - 0.01))
    assert tell(takes=EVERYTHING)[1] == started
    assert tell(takes=EVERYTHING, free=EVERYTHING)[1] != started
    monkeypatch.setenv("PATCHKIT_MISSING", "")
    with rank_in(group, "sleep", "99") as rank:
        assert tell(takes=EVERYTHING)[1] == started
        rank.kill()


def test_starts_on_one_node_take_their_memory_one_after_the_other(monkeypatch):
    """Both fit alone: the second waits until the first has its memory, or its guard was killed."""
    told = []
    monkeypatch.setattr(memory_script, "notify", listener(told))
    first, second, third = (
        guard_with(0.001, name=name, takes=1.0) for name in ("x", "y", "z")
    )
    first.look()
    for guard in (second, first, second):
        look(guard)
    assert (first._waits, second._waits) == (False, True)
    second._noted_at = 0.0
    second.look()
    assert told[-1].startswith("STATUS=the start waits for another start to load: ")

    first._turn_until = math.inf  # less is left
    first.look()
    third.look()
    second.look()
    assert (third._waits, second._waits) == (False, True)
    os.close(third._turn)  # as the kernel does for a process that ends
    second.look()
    assert not second._waits


@pytest.mark.parametrize(
    ("takes", "free", "waiting"),
    [
        (40.0, 100, {110: True, 75: True, 73: False}),
        # Less than twice the floor: half of it has to be there.
        (3.9, 8, {9: True, 8: True, 7: False}),
    ],
)
def test_a_turn_ends_once_its_start_holds_what_was_planned(
    monkeypatch, takes, free, waiting
):
    """With a cache in bytes vLLM wants more free than it takes."""
    left = memory_trigger.MemoryLeft((free - 1) * GIB, False)
    monkeypatch.setattr(MemoryReader, "read", lambda _: left)
    first = guard_with(2, takes=takes, free=float(free))
    second = guard_with(2, name="y", takes=takes)
    first.look()
    assert first._waits

    for gib, waits in waiting.items():
        left = memory_trigger.MemoryLeft(gib * GIB, False)
        first.look()
        second.look()
        assert (first._waits, second._waits) == (False, waits)


@pytest.mark.parametrize(("takes", "mark"), [(97.0, 3), (99.0, 2), (40.0, 4), (0.0, 4)])
def test_waiting_counts_below_what_a_planned_load_leaves(monkeypatch, takes, mark):
    left = memory_trigger.MemoryLeft(100 * GIB, False)
    monkeypatch.setattr(MemoryReader, "read", lambda _: left)
    guard = guard_with(2, takes=takes)
    look(guard)
    assert (guard.trigger.mark, guard.mark) == (mark * GIB, 4 * GIB)


def test_a_guard_that_was_killed_while_its_rank_loads_keeps_its_turn(
    group, monkeypatch
):
    """systemd keeps the open folder, and gives it to the next guard."""
    left = memory_trigger.MemoryLeft(110 * GIB, False)
    monkeypatch.setattr(MemoryReader, "read", lambda _: left)
    killed = guard_with(2, group, takes=40.0)
    killed.look()
    second = guard_with(2, name="y", takes=40.0)
    second.look()
    monkeypatch.setattr(memory_script, "_KEPT", killed._turn)
    monkeypatch.setenv("LISTEN_FDS", "1")
    with rank_in(group, "sleep", "99") as rank:
        again = guard_with(2, group, takes=40.0)
        for gib, waits in ((90, True), (73, False)):
            left = memory_trigger.MemoryLeft(gib * GIB, False)
            again.look()
            second.look()
            assert (again._waits, second._waits) == (False, waits)
        rank.kill()


SWAP = "MemTotal: 1120884 kB\nMemAvailable: {} kB\nSwapTotal: {} kB\nSwapFree: 4 kB\n"
FULL = "some avg10=9.1 avg60=4.0 avg300=1.0 total=9\nfull avg10=8.0 avg60=3.9 avg300=0.9 total={}\n"


# Seconds of each second in which all processes waited, on user-mode Linux: swap fills, and is full.
FILLS = [0.01, 0.01, 0.01, 0.02, 0.02, 0.05, 0.0, 0.01, 0.04, 0.0, 0.02, 0.03, 0.01]
IS_FULL = [0.3, 0.62, 0.54, 0.58, 0.51]


@pytest.mark.parametrize(
    ("left", "swap", "waits", "is_killed"),
    [
        (0.3, 524284, FILLS, False),
        (0.3, 524284, [*FILLS, *IS_FULL], True),
        (0.3, 524284, [1.0, 1.0], True),
        (0.3, 0, IS_FULL, False),  # without swap the floor decides
        (0.5, 524284, IS_FULL, False),  # above the mark
        (0.3, 524284, [1.0, 0.3, *[0.0] * 6] * 9, False),  # a load that goes on
        (0.1, 0, [0.0], True),
    ],
)
def test_with_swap_a_rank_is_ended_once_all_processes_wait(
    group, capsys, left, swap, waits, is_killed
):
    with rank_in(group, "sleep", "99") as rank:
        guard = guard_with(0.2, group)
        reader = guard.trigger._reader
        reader._meminfo = os.memfd_create("meminfo")
        reader._pressure = os.memfd_create("pressure")
        put_text(reader._meminfo, SWAP.format(int(left * GIB), swap))
        put_text(reader._pressure, FULL.format(0))
        look(guard)

        for second in range(len(waits)):
            total = sum(waits[: second + 1])
            put_text(reader._pressure, FULL.format(round(total * 1e6)))
            reader._pressure_at = time.monotonic() - 1
            guard.trigger.look()
        guard.wait()
        if is_killed:
            assert rank.wait(5) == -9
        assert (rank.poll() is not None) == is_killed
        rank.kill()
    stalls = "; all processes wait for memory, since it is swapped; "
    assert (stalls in capsys.readouterr().out) == (is_killed and bool(swap))


@pytest.mark.parametrize("pressure", ["/proc/self/mem", "/no/file"])
def test_a_kernel_that_refuses_its_pressure_leaves_the_floor(monkeypatch, pressure):
    """With psi=0 older kernels have the file, and an error (EIO here) for who reads it."""
    monkeypatch.setattr(memory_trigger, "_PRESSURE", pressure)
    memory = MemoryReader().read()
    assert (memory.left > 0, memory.is_stalled) == (True, False)


def test_nodes_that_share_a_home_have_turns_of_their_own(tmp_path, monkeypatch):
    """A rank takes its memory only once those of the other nodes have joined."""
    guards = []
    for node in ("head", "worker"):
        (tmp_path / node).mkdir()
        monkeypatch.setattr(memory_script, "_TURN", str(tmp_path / node))
        guards.append(guard_with(0.001, takes=0.01))
        guards[-1].look()
    assert [guard._waits for guard in guards] == [False, False]


def put_text(descriptor, text):
    os.pwrite(descriptor, text.encode(), 0)
    os.ftruncate(descriptor, len(text))


def test_a_stuck_process_in_a_container_holds_up_nothing(group, monkeypatch):
    """To read its mark blocks; the rank's own container is found, and its groups are read once."""
    container = group / "docker-1.scope"
    container.mkdir()
    asked = []

    def stick(pid):
        asked.append(pid)
        return read_mark(pid)

    monkeypatch.setattr(memory_script, "read_mark", stick)
    monkeypatch.setattr(memory_script, "_SECOND", 0.01)
    monkeypatch.setenv("PATCHKIT_CLUSTER", "x")
    with rank_in(container, "sleep", "99") as rank:
        guard = guard_with(0.001, inside=["docker"])
        deadline = time.monotonic() + 20
        while container not in guard._inodes and time.monotonic() < deadline:
            look(guard)
            time.sleep(0.05)
        time.sleep(3)
        look(guard)
        assert [*guard._inodes] == [container]
        assert asked == [rank.pid] * 10

        stuck = threading.Event()
        monkeypatch.setattr(memory_script, "read_mark", lambda _: stuck.wait(60))
        (group / "docker-2.scope").mkdir()
        with rank_in(group / "docker-2.scope", "sleep", "99") as other:
            time.sleep(3)
            let_nothing_be_enough(guard)
            look(guard)
            assert (rank.wait(5), other.poll()) == (-9, None)
            assert read_stop("x", "abc").text.endswith(": ended the rank")
            other.kill()
        stuck.set()
    for path in ("docker-1.scope", "docker-2.scope"):
        (group / path).rmdir()


def test_what_is_left_of_a_rank_is_named_and_killed_at_the_next_look(
    group, monkeypatch
):
    """Without cgroup.kill one may be missed, or be refused as another user's."""
    monkeypatch.setattr(memory_script.os, "open", without(os.open, "cgroup.kill"))
    with rank_in(group, "sleep", "99") as rank, rank_in(group, "sleep", "99") as other:
        guard = guard_with(0.001, group)
        look(guard)
        let_nothing_be_enough(guard)
        kill = os.kill
        refused = [rank.pid]

        def refuse(pid, number):
            if pid in refused:
                raise PermissionError
            kill(pid, number)

        monkeypatch.setattr(memory_trigger.os, "kill", refuse)
        look(guard)
        assert (other.wait(5), rank.poll()) == (-9, None)
        stop = read_stop("x", "abc")
        who = f"sleep (process {rank.pid} of {pwd.getpwuid(os.getuid()).pw_name})"
        assert stop.text.endswith(f"SIGKILL is refused, so docker alone may end: {who}")

        refused.clear()
        look(guard)
        assert (rank.wait(5), read_stop("x", "abc")) == (-9, stop)


CONTAINER = "0123456789abcdef" * 4
REQUEST = (
    f"POST /containers/{CONTAINER}/kill HTTP/1.1\r\n"
    "Host: docker\r\nContent-Length: 0\r\n\r\n"
).encode()


def test_docker_is_asked_once_to_end_what_sigkill_is_refused_for(
    home, group, monkeypatch
):
    """Its daemon listens only while memory is enough: below the floor nothing is opened."""
    kill = os.kill
    is_refused = True

    def refuse(pid, number):
        if is_refused:
            raise PermissionError
        kill(pid, number)

    monkeypatch.setattr(memory_trigger, "_DOCKER", f"unix://{home}/docker.sock")
    monkeypatch.setattr(memory_trigger.os, "kill", refuse)
    monkeypatch.setattr(memory_script.os, "open", without(os.open, "cgroup.kill"))
    container = group / f"docker-{CONTAINER}.scope"
    container.mkdir()

    guard = guard_with(0.001, container)
    look(guard)  # no docker: nothing happens
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(f"{home}/docker.sock")
        daemon.listen()
        daemon.settimeout(10)
        look(guard)
        daemon.accept()[0].close()  # as docker does after 5 minutes without a request
        look(guard)
        connection, _address = daemon.accept()
        connection.settimeout(10)

        with rank_in(container, "sleep", "99") as rank:
            let_nothing_be_enough(guard)
            for _ in range(3):
                look(guard)
            connection.settimeout(0.2)
            assert connection.recv(4096) == REQUEST
            connection.send(b"HTTP/1.1 204 No Content\r\n\r\n")
            with pytest.raises(TimeoutError):
                connection.recv(4096)
            assert "docker alone may end: sleep (process" in read_stop("x", "abc").text

            is_refused = False
            look(guard)
            assert rank.wait(5) == -9

        guard.trigger.floor = guard.trigger.mark = 1
        look(guard)
        daemon.accept()[0].close()  # opened anew, since docker answered
        connection.close()
        guard.trigger._docker.close()
    container.rmdir()


def test_a_rank_without_a_container_opens_no_socket_of_docker(home, group, monkeypatch):
    monkeypatch.setattr(memory_trigger, "_DOCKER", f"unix://{home}/docker.sock")
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(f"{home}/docker.sock")
        daemon.listen()
        daemon.setblocking(False)
        look(guard_with(0.001, group))
        with pytest.raises(BlockingIOError):
            daemon.accept()


def test_a_guard_that_saw_no_container_claims_no_end_of_it(group):
    """A container of another user is not found, since nobody else may read its mark."""
    with rank_in(group, "sleep", "99") as program:
        guard = guard_with(
            0.001, group, inside=["/usr/bin/docker", "exec", "patchkit-x"]
        )
        look(guard)
        let_nothing_be_enough(guard)
        look(guard)
        assert program.wait(5) == -9
    assert read_stop("x", "abc").text.endswith("but saw no container of the rank")


@pytest.mark.parametrize(
    "content",
    [
        "",
        json.dumps(STOP)[:-9],  # the guard was killed while it wrote
        json.dumps({**STOP, "time": float("nan")}),
        json.dumps({**STOP, "missing": -1}),
        json.dumps({**STOP, "missing": 1e305}),
        json.dumps({**STOP, "time": ["b"]}),
        "[" * 4000,
        "[]",
    ],
)
def test_a_record_of_another_form_is_none(content):
    put_record(open_record("x", "json"), content.encode())
    assert read_stop("x", "a") is None


def test_a_record_says_no_more_than_a_line(home):
    lines = {**STOP, "start": "a\x1b]0;b\x07\n"}
    put_record(open_record("x", "json"), json.dumps(lines).encode())
    assert read_stop("x", "a]0;b").start == "a]0;b"

    path = record_path("x", "json")
    (home / "other").write_text(json.dumps(STOP))
    for make in (
        lambda: os.mkfifo(path),
        lambda: path.symlink_to(home / "other"),
        path.mkdir,
    ):
        path.unlink()
        make()
        assert read_stop("x", "a") is None


def test_the_guard_goes_on_without_its_records(home, group, monkeypatch, capsys):
    """A FIFO would hold up its writer; a link and a device are another's."""
    boot = record_path("x", BOOT.read_text().strip())
    boot.parent.mkdir(parents=True)
    os.mkfifo(boot)
    for number in range(10):
        (boot.parent / f"x.{number}-0").mkdir()
    record_path("x", "json").symlink_to(home / "other")

    guard = guard_with(0.001, group)
    assert capsys.readouterr().out.count("goes on without this record: [Errno ") == 2
    with rank_in(group, "sleep", "99") as rank:
        look(guard)
        let_nothing_be_enough(guard)
        look(guard)
        assert rank.wait(5) == -9
    guard.finish()
    assert "ended the rank" in capsys.readouterr().out
    assert (read_stop("x", "abc"), (home / "other").exists()) == (None, False)
    record_path("x", "json").unlink()
    record_path("x", "json").mkdir()
    with pytest.raises(OSError, match="directory"):
        open_record("x", "json")
