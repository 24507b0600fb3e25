"""Ask what is refused, and that nothing is lost by it: a switch cut short, an odd node."""

from __future__ import annotations

import json
import time
from signal import SIGINT

from e2e.lifecycle import wiring
from e2e.lifecycle.cluster import (
    MODEL,
    OTHER_MODEL,
    URL,
    EmulatedCluster,
    LifecycleLab,
    insist,
    wait,
)
from e2e.lifecycle.launcher import PATCHKIT
from e2e.lifecycle.nodes import UID, USER
from e2e.lifecycle.starting import MASTER_PORT
from patchkit.errors import HostError, StorageError
from patchkit.process import Completed

MOMENTS = ("at once", "stopped", "loading")  # when Ctrl-C comes


def switch_cut_short(lab: LifecycleLab) -> str:
    """`switch` that ends before its start: worker's disk full, port taken, Ctrl-C."""
    with lab.serving("switch_cut_short") as cluster:
        head, worker = cluster.rack["spark1"], cluster.rack["spark2"]
        worker.fill()
        full = cluster.patchkit("switch", OTHER_MODEL)
        worker.unfill()
        insist(full.status == StorageError.exit_code, f"disk full: {full.trouble}")
        insist(f"{MODEL} is served again" in full.errors, f"disk full: {full.errors}")
        insist(_served(cluster) == MODEL, "with a full disk the former one is gone")
        # Takes the port as soon as the former rank gives it back, so that neither can start.
        again = ("Restart=always", "RestartSec=50ms")
        own = ("python3", "-m", "http.server", "--bind", wiring.qsfp_ip(1), str(MASTER_PORT))
        options = ("--property=StartLimitIntervalSec=0", *(f"--property={each}" for each in again))
        head.user("systemd-run", "--user", "--unit=other", *options, *own)
        taken = cluster.patchkit("switch", OTHER_MODEL)
        head.user("systemctl", "--user", "stop", "other")
        insist(taken.status == HostError.exit_code, f"port taken: {taken.trouble}")
        names = (f"{OTHER_MODEL} was not started", f"{MODEL}, served before, does not come back")
        insist(all(each in taken.errors for each in names), f"port taken: {taken.errors}")
        cluster.down()
        cluster.up()
        told = [_interrupted(cluster, moment) for moment in MOMENTS]
    return f"disk full: the former again; port taken: both named; Ctrl-C: {', '.join(told)}"


def _interrupted(cluster: EmulatedCluster, moment: str) -> str:
    """Interrupt a switch; what it says is served has to be."""
    laptop, before, former = cluster.rack.laptop, cluster.ranks(), _served(cluster)
    target = MODEL if former == OTHER_MODEL else OTHER_MODEL
    log = f"interrupted-{moment.replace(' ', '-')}"
    started = laptop.start(*PATCHKIT, "switch", target, log=log)
    if moment == "at once":
        time.sleep(0.5)
    else:
        old = {pid for found in before.values() for pids in found.values() for pid in pids}

        def reached() -> bool:
            now = {p for found in cluster.ranks().values() for pids in found.values() for p in pids}
            return not now & old and (moment == "stopped" or bool(now))

        wait(reached, cluster.patience, f"the former one is not {moment}")
    laptop.kill(started, SIGINT)
    status, said = started.wait(), laptop.node.log(log).read_text()
    insist(status == 128 + SIGINT, f"status {status}: {said}")
    *_, last = said.strip().split("\n")
    wait(cluster.answers, cluster.patience, f"after {last!r} nothing answers")
    served = _served(cluster)
    if "nothing was changed" in last:
        insist(cluster.ranks() == before, f"it says {last!r}, and ranks are new")
        insist(moment == "at once", f"it says {last!r}, {moment}")
        return "as it was"
    back = f"{former} is started again" in last
    insist(back or f"{target} is started" in last, f"it does not say what is served: {said}")
    insist(served == (former if back else target), f"{served} is served; it says {said}")
    return "the former again" if back else "the new one"


def no_linger(lab: LifecycleLab) -> str:
    """No lingering on the worker: its units would end with the last login."""
    with lab.prepared("no_linger") as cluster:
        worker = cluster.rack["spark2"]
        worker.root("loginctl", "disable-linger", USER)
        init = cluster.patchkit("init", *cluster.names, "--file", "bare.toml")
        places = ("spark1: address: ", "on spark1: give it one", "spark2: linger: ")
        insist(all(each in init.output for each in places), f"init: {init.output}")
        written = cluster.patchkit("init", *cluster.names, *_OPTIONS, "--file", "other.toml")
        insist("loginctl enable-linger" in _next(written), f"init's next: {written.output}")
        refused = cluster.patchkit("up", MODEL)
        insist(refused.status == HostError.exit_code, f"up: {refused.trouble}")
        cure = "ssh -t spark2 'loginctl enable-linger'"
        insist(cure in refused.errors, f"up does not name the cure: {refused.errors}")
        cluster.insist_on_nothing()
        worker.root("loginctl", "enable-linger", USER)
        ready = f"[ -S /run/user/{UID}/bus ]"
        wait(lambda: not worker.root("sh", "-c", ready).trouble, 20, "no user manager")
        cluster.up()
        cluster.down()
    return f"`up` exits with {refused.status} and the command; with it, it serves"


_OPTIONS = ("--topology", "socket", "--target", "gb10", "--head-ip", wiring.qsfp_ip(1))


def _next(done: Completed) -> str:
    """Return the last line of what is said, the next step."""
    return done.output.strip().rpartition("\n")[2]


def _served(cluster: EmulatedCluster) -> str:
    models = cluster.rack["spark1"].user("curl", "--silent", f"{URL}/v1/models").output
    return str(json.loads(models)["data"][0]["id"]) if models else ""
