"""Disturb `patchkit cluster` while it runs: it is killed, refused, or not alone."""

from __future__ import annotations

import sys
import time
from signal import SIGINT, SIGKILL

from e2e.lifecycle.cluster import MODEL, OTHER_MODEL, EmulatedCluster, LifecycleLab, insist, wait

PATCHKIT = (sys.executable, "-m", "patchkit")
MOMENTS = (0.2, 0.5, 0.8, 1.2, 1.7, 2.5, 3.5, 5.0)  # seconds from the start to the kill


def ssh_refused(lab: LifecycleLab) -> str:
    """The worker's sshd ends, with all connections, in the middle of `up`."""
    with lab.prepared("ssh_refused") as cluster:
        worker, laptop = cluster.rack["spark2"], cluster.rack.laptop
        started = laptop.start(*PATCHKIT, "up", MODEL, log="up")
        time.sleep(1)
        worker.refuse_ssh()
        status = started.wait()
        said = laptop.node.log("up").read_text()
        insist("Traceback" not in said, said)
        insist(status == 0 or "spark2" in said, f"up does not name the node: {said}")
        worker.allow_ssh()
        cluster.up()
        cluster.down()
    return f"up ends with status {status} and names the node; again, with sshd, it serves"


def launcher_killed_in_up(lab: LifecycleLab) -> str:
    """`kill -9` of `up` at any moment, then `up` again."""
    with lab.prepared("launcher_killed_in_up") as cluster:
        count = 0
        for moment in MOMENTS:
            count += killed(cluster, moment, "up", MODEL)
            cluster.up()
            cluster.down()
    return f"killed {count} times; up again serves each time"


def launcher_killed_in_switch(lab: LifecycleLab) -> str:
    """`kill -9` of `switch` at any moment, then `switch` again."""
    with lab.serving("launcher_killed_in_switch") as cluster:
        count, models = 0, (OTHER_MODEL, MODEL)
        for number, moment in enumerate(MOMENTS):
            model = models[number % 2]
            count += killed(cluster, moment, "switch", model)
            done = cluster.patchkit("switch", model)
            insist(done.status == 0, f"switch: {done.trouble}")
            insist(cluster.answers(), "after switch it does not answer")
    return f"killed {count} times; switch again serves each time"


def held(lab: LifecycleLab) -> str:
    """`up --hold`: Ctrl-C, then `kill -9` while it loads and while it serves."""
    with lab.prepared("held") as cluster:
        laptop, told = cluster.rack.laptop, []
        for number, loaded in ((SIGINT, True), (SIGKILL, False), (SIGKILL, True)):
            started = laptop.start(*PATCHKIT, "up", MODEL, "--hold", log="held")
            if loaded:
                wait(cluster.answers, cluster.patience, "it is held, and does not answer")
            else:
                wait(lambda: any(map(any, _processes(cluster))), cluster.patience, "no start")
            time.sleep(4 if loaded else 1)  # until `up` has heard of it as well
            laptop.kill(started, number)
            status, began = started.wait(), time.monotonic()
            wait(lambda: not cluster.left(), 30, "something is left")
            when = "serving" if loaded else "loading"
            told.append(f"{number.name}, {when}: gone after {time.monotonic() - began:.0f} s")
            insist(number == SIGKILL or status == 0, f"status {status}")
    return "; ".join(told)


def _processes(cluster: EmulatedCluster) -> list[list[list[str]]]:
    return [list(found.values()) for found in cluster.ranks().values()]


def second_up(lab: LifecycleLab) -> str:
    """A second `up` from another terminal, at the same time."""
    with lab.prepared("second_up") as cluster:
        laptop = cluster.rack.laptop
        both = [laptop.start(*PATCHKIT, "up", MODEL, log=f"up{number}") for number in (1, 2)]
        ends = sorted(each.wait() for each in both)
        said = "".join(laptop.node.log(f"up{number}").read_text() for number in (1, 2))
        insist("Traceback" not in said, said)
        insist(ends[0] == 0, f"neither worked: {said}")
        cluster.heals()
        cluster.down()
    return f"exit statuses {ends[0]} and {ends[1]}; one group serves"


def killed(cluster: EmulatedCluster, moment: float, *words: str) -> bool:
    """Run a command and kill it after so many seconds. False if it ended before."""
    laptop = cluster.rack.laptop
    started = laptop.start(*PATCHKIT, *words, log="killed")
    time.sleep(moment)
    alive = started.poll() is None
    if alive:
        laptop.kill(started)
    started.wait()
    return alive
