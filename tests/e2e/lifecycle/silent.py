"""Silence: of a node, of a login, of a server that runs, and of the launcher.

That clocks differ is no scenario: all nodes have this machine's. A unit test has offsets.
"""

from __future__ import annotations

import json
import sys
import time
from signal import SIGSTOP

from e2e.lifecycle import fake_venv
from e2e.lifecycle.cluster import MODEL, EmulatedCluster, LifecycleLab, insist, wait
from e2e.lifecycle.launcher import PATCHKIT
from e2e.lifecycle.nodes import HOME
from patchkit.cluster.ssh.answer import LEASE
from patchkit.errors import BusyError, HostError

TITLE = "printf '\\033]0;title\\007'\n"
HANGS = "sleep 1000\n"
# Takes the lock of the cluster and keeps it.
HOLDS = (
    "import time\n"
    "from patchkit.cluster.launch.cluster import Cluster\n"
    "from patchkit.cluster.launch.cluster_file import read_cluster_file\n"
    "with Cluster(read_cluster_file()).alone():\n"
    "    print('held', flush=True)\n"
    "    time.sleep(1000)\n"
)


def silent_node(lab: LifecycleLab) -> str:
    """The worker without power, then its login hangs: `status`, `logs`, `up` name it and end."""
    with lab.serving("silent_node") as cluster:
        worker = cluster.rack["spark2"]
        _write_login(cluster, HANGS)
        hung = _told_of(cluster, "no sign of life")
        _write_login(cluster, "")
        worker.kill()
        _told_of(cluster, "ssh: connect")
        worker.boot()
        cluster.heals()
    return f"status and logs exit with 9 and show the head; a login that hangs: {hung:.0f} s"


def _told_of(cluster: EmulatedCluster, why: str) -> float:
    """Insist that a silent worker is named, and the head shown; return how long `status` took."""
    began = time.monotonic()
    status = cluster.patchkit("status")
    took = time.monotonic() - began
    insist(status.status == HostError.exit_code, f"status: {status.status} {status.errors}")
    insist("silent spark2" in status.output and why in status.output, status.output)
    insist("GiB free" in status.output, f"the head is not shown: {status.output}")
    logs = cluster.patchkit("logs", "-n", "5")
    insist(logs.status == HostError.exit_code and "spark1" in logs.output, f"logs: {logs}")
    insist(why in logs.errors, f"logs does not say why: {logs.errors}")
    up = cluster.patchkit("up", MODEL)
    insist(up.status == HostError.exit_code and "spark2" in up.errors, f"up: {up.errors}")
    return took


def _write_login(cluster: EmulatedCluster, text: str, name: str = "spark2") -> None:
    fake_venv.write(cluster.rack[name], f"{HOME}/.bashrc", text)


def login_prints_a_title(lab: LifecycleLab) -> str:
    """Every login prints a terminal's title, without the end of a line."""
    with lab.prepared("login_prints_a_title") as cluster:
        for name in cluster.names:
            _write_login(cluster, TITLE, name)
        cluster.up()
        status = cluster.patchkit("status")
        insist(status.status == 0, f"status: {status.trouble}")
        cluster.down()
    return "up, status and down as ever"


def server_hung(lab: LifecycleLab) -> str:
    """The API server is stopped by SIGSTOP, and goes on later."""
    with lab.serving("server_hung") as cluster:
        head = cluster.rack["spark1"]
        (process,) = cluster.processes("spark1")["main"]
        head.user("kill", "-STOP", process)
        status = cluster.patchkit("status")
        insist(status.status == HostError.exit_code, f"status: {status.status} {status.output}")
        insist("hangs spark1: " in status.output, status.output)
        said = json.loads(cluster.patchkit("status", "--json").output)
        insist(said["answers"] is False and said["hangs"], f"--json: {said}")
        up = cluster.patchkit("up", MODEL)
        insist(up.status == HostError.exit_code, f"up: {up.status} {up.output}")
        insist("the model hangs" in up.errors, up.errors)
        head.user("kill", "-CONT", process)
        again = cluster.patchkit("status")
        insist(again.status == 0, f"status: {again.output}")
    return f"status and up exit with {up.status}; once it goes on, with 0"


def launcher_frozen(lab: LifecycleLab) -> str:
    """The launcher's machine sleeps while it holds the cluster."""
    with lab.prepared("launcher_frozen") as cluster:
        laptop = cluster.rack.laptop
        holder = laptop.start(sys.executable, "-c", HOLDS, log="holder")
        wait(lambda: "held" in laptop.node.log("holder").read_text(), 30, "it does not hold")
        laptop.kill(holder, SIGSTOP)
        began = time.monotonic()
        busy = cluster.patchkit("up", MODEL)
        insist(busy.status == BusyError.exit_code, f"up: {busy.status} {busy.errors}")
        insist(", from 10." in busy.errors or ", from 1" in busy.errors, busy.errors)

        def free() -> bool:
            return cluster.patchkit("down").status == 0

        wait(free, int(LEASE) + 30, "the lock is held for ever")
        lost = time.monotonic() - began
    return f"others exit with {busy.status}, for {lost:.0f} s"


def hold_frozen(lab: LifecycleLab) -> str:
    """The launcher's machine sleeps behind `up --hold`."""
    with lab.prepared("hold_frozen") as cluster:
        laptop = cluster.rack.laptop
        started = laptop.start(*PATCHKIT, "up", MODEL, "--hold", log="held")
        wait(cluster.answers, cluster.patience, "it is held, and does not answer")
        time.sleep(1)
        laptop.kill(started, SIGSTOP)
        began = time.monotonic()
        wait(lambda: not cluster.left(), int(LEASE) + 60, "it serves on")
        took = time.monotonic() - began
    return f"gone after {took:.0f} s"
