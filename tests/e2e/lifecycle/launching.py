"""Disturb `patchkit` itself: what it refuses, what it is told, killed, frozen, not alone."""

from __future__ import annotations

import sys
import time
from signal import SIGINT, SIGSTOP

from e2e.emulation import wires
from e2e.lifecycle.cluster import (
    ANY,
    MASTER_PORT,
    MODEL,
    OTHER_MODEL,
    EmulatedCluster,
    insist,
    scenario,
    wait,
)
from e2e.lifecycle.nodes import UID, USER
from e2e.lifecycle.scenarios import ERROR, REFUSED
from patchkit.cluster.ssh.answer import LEASE
from patchkit.errors import BusyError, StorageError

MOMENTS = (0.2, 0.5, 0.8, 1.2, 1.7, 2.5, 3.5, 5.0)  # seconds from the start to the kill
OPTIONS = ("--topology", "socket", "--target", "gb10", "--head-ip", wires.qsfp_ip(1))
# Takes the lock of the cluster and keeps it.
HOLDS = """\
import time
from pathlib import Path
from patchkit.cluster.launch.cluster import read_cluster_file
with read_cluster_file(Path("cluster.toml")).alone():
    print("held", flush=True)
    time.sleep(1000)
"""
# What shells, systemd, its specifiers, its env files or C might read otherwise than it stands.
ODD = (
    *(
        "two words",
        "",
        "'",
        '"',
        'it\'s "so"',
        "%h %% %n",
        "$HOME ${HOME} $$",
        "\\",
        "a\\nb\\\\",
    ),
    *(
        "#no comment",
        ";",
        "\\;",
        "a;b",
        "-",
        "@",
        "~/x",
        "*",
        "{'a': [1, 2]}",
        '{"a": "$b %i"}',
    ),
    *("größer 日本 🙂", "`id` $(id)", "a=b", "|&<>!?", "\\x41\\u0041\\101", " both "),
)
BLANK = ("tab\tand\nline", "\x07\x1b[0m")


@scenario("stopped")
def init_in_the_lab(cluster: EmulatedCluster) -> str:
    """`init` writes the file that serves; an edit stays; a name that the head does not know."""
    file = cluster.home / "cluster.toml"
    file.unlink()
    config = cluster.home / ".ssh/config"
    alias = f"Host second\n  HostName {wires.lan_ip(2)}\n  User spark\n"
    config.write_text(config.read_text() + alias)
    init = ("init", "spark1", "second", *OPTIONS)
    cluster.patchkit(*init)
    text = file.read_text()
    insist(f'peer = "{wires.qsfp_ip(2)}"' in text, f"no peer: {text}")
    cluster.up()
    cluster.down()
    edited = text.replace("port = 8000", "port = 8000  # mine")
    file.write_text(edited)
    again = cluster.patchkit(*init)
    insist(again.status != 0 and file.read_text() == edited, "init overwrote an edit")
    forced = cluster.patchkit(*init, "--force")
    insist(file.read_text() == text, f"--force: {forced.trouble}")
    return f"serves; `init` again exits with {again.status}, the edit stays"


@scenario("stopped", engines=ANY)
def odd_words(cluster: EmulatedCluster) -> str:
    """Arguments and variables with blanks, quotes, %, $, backslashes and more in cluster.toml."""
    variables = {f"ODD_{number}": word for number, word in enumerate(ODD)}
    words = ["--odd", *ODD, *BLANK]
    cluster.describe(args=words, set=variables)
    cluster.up()
    for name, node in cluster.nodes.items():
        (pid,) = cluster.processes(name)["main"]
        argv = node.file(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
        insist(argv[-len(words) :] == words, f"{name} got {argv[-len(words) :]}")
        environ = node.file(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        got = dict(each.split("=", 1) for each in environ if each.startswith("ODD_"))
        insist(got == variables, f"{name} got {got}")
    return f"{len(words)} words and {len(variables)} variables arrive unchanged on both nodes"


@scenario("stopped")
def up_refused(cluster: EmulatedCluster) -> str:
    """A full disk, the rendezvous' port taken, a firewall, no lingering on the worker: in turn."""
    head, worker = cluster.head, cluster.worker

    def refused(*says: str, status: int = REFUSED) -> None:
        cluster.expect("up", MODEL, status=status, says=says)
        cluster.insist_on_nothing()

    worker.fill()
    refused("spark2", status=StorageError.exit_code)
    worker.unfill()
    head.start_other(MASTER_PORT)
    refused(f"{MASTER_PORT}")
    head.stop_other()
    head.drop_all_but_ssh()
    refused("spark2", "lets no TCP through", "a firewall")
    head.drop_nothing()
    worker.root("loginctl", "disable-linger", USER)
    init = cluster.patchkit("init", *cluster.names, "--file", "bare.toml")
    said = " ".join(f"{init.output}{init.errors}".split())
    places = ("address: ", "on spark1: give it one", "linger: ")
    insist(all(each in said for each in places), f"init: {said}")
    refused("ssh -t spark2 'loginctl enable-linger'")
    worker.root("loginctl", "enable-linger", USER)
    ready = f"[ -S /run/user/{UID}/bus ]"
    wait(lambda: not worker.root("sh", "-c", ready).trouble, 20, "no user manager")
    cluster.up()
    return "each is named, with its cure; nothing is started; without them it serves"


@scenario("serving")
def switch_refused(cluster: EmulatedCluster) -> str:
    """`switch`: worker's disk full, the model fails, port taken, Ctrl-C at three moments."""
    cluster.worker.fill()
    # podman, whose images are in the home, cannot look into one: nothing was stopped for that.
    says = (
        "the disk is full" if cluster.engine == "podman" else f"{MODEL} is served again"
    )
    cluster.expect("switch", OTHER_MODEL, status=StorageError.exit_code, says=says)
    cluster.worker.unfill()
    insist(cluster.served() == MODEL, "with a full disk the former one is gone")
    cluster.change(FAIL=ERROR, FAIL_MODEL=OTHER_MODEL[1:])
    cluster.expect("switch", OTHER_MODEL, status=REFUSED, says=ERROR)
    insist(
        cluster.answers() and cluster.served() == MODEL,
        "after an error the former one is gone",
    )
    cluster.change()
    # Takes the port as soon as the former rank gives it back, so that neither can start.
    restart = ("StartLimitIntervalSec=0", "Restart=always", "RestartSec=50ms")
    cluster.head.start_other(MASTER_PORT, restarts=restart)
    names = (
        f"{OTHER_MODEL} was not started",
        f"{MODEL}, served before, does not come back",
    )
    cluster.expect("switch", OTHER_MODEL, status=REFUSED, says=names)
    cluster.head.stop_other()
    cluster.down()
    cluster.up()
    told = [_interrupt(cluster, moment) for moment in ("at once", "stopped", "loading")]
    return (
        "disk full, model fails: the former again; port taken: both named; "
        f"Ctrl-C: {', '.join(told)}"
    )


def _interrupt(cluster: EmulatedCluster, moment: str) -> str:
    """Interrupt a switch; what it says is served has to be."""
    laptop, before, former = cluster.laptop, cluster.ranks(), cluster.served()
    target = MODEL if former == OTHER_MODEL else OTHER_MODEL
    log = f"interrupted-{moment.replace(' ', '-')}"
    started = laptop.start_patchkit("switch", target, log=log)
    if moment == "at once":
        time.sleep(0.5)
    else:
        old = {
            pid for found in before.values() for pids in found.values() for pid in pids
        }

        def reached() -> bool:
            now = {
                p
                for found in cluster.ranks().values()
                for pids in found.values()
                for p in pids
            }
            return not now & old and (moment == "stopped" or bool(now))

        wait(reached, cluster.patience, f"the former one is not {moment}")
    laptop.kill(started, SIGINT)
    status, said = started.wait(), laptop.said(log)
    insist(status == 128 + SIGINT, f"status {status}: {said}")
    *_, last = said.strip().split("\n")
    wait(cluster.answers, cluster.patience, f"after {last!r} nothing answers")
    if "nothing was changed" in last:
        insist(cluster.ranks() == before, f"it says {last!r}, and ranks are new")
        insist(moment == "at once", f"it says {last!r}, {moment}")
        return "as it was"
    back = f"{former} is started again" in last
    insist(
        back or f"{target} is started" in last,
        f"it does not say what is served: {said}",
    )
    insist(
        cluster.served() == (former if back else target), f"{last!r}, and it is not so"
    )
    return "the former again" if back else "the new one"


@scenario("stopped", engines=("docker",))
def second_up(cluster: EmulatedCluster) -> str:
    """A second `up` from another terminal, at the same time."""
    laptop, logs = cluster.laptop, ("up1", "up2")
    both = [laptop.start_patchkit("up", MODEL, log=log) for log in logs]
    ends = sorted(each.wait() for each in both)
    said = "".join(map(laptop.said, logs))
    insist("Traceback" not in said, said)
    insist(ends[0] == 0, f"neither worked: {said}")
    cluster.heals()
    return f"exit statuses {ends[0]} and {ends[1]}; one group serves"


@scenario("stopped")
def launcher_killed(cluster: EmulatedCluster) -> str:
    """`kill -9` of `up` at any moment, then `up` again; the same of `switch`."""
    count = 0
    for moment in MOMENTS:
        count += kill_launcher(cluster, moment, "up", MODEL)
        cluster.up()
        count += kill_launcher(cluster, moment, "switch", OTHER_MODEL)
        cluster.expect("switch", OTHER_MODEL)
        insist(cluster.answers(), "after switch it does not answer")
        cluster.down()
    return f"killed {count} times; the same command again serves each time"


def kill_launcher(cluster: EmulatedCluster, moment: float, *words: str) -> bool:
    """Run a command and kill it after so many seconds. False if it ended before."""
    laptop = cluster.laptop
    started = laptop.start_patchkit(*words, log="killed")
    time.sleep(moment)
    alive = started.poll() is None
    if alive:
        laptop.kill(started)
    started.wait()
    return alive


@scenario("stopped")
def launcher_frozen(cluster: EmulatedCluster) -> str:
    """The launcher's machine sleeps while it holds the cluster."""
    laptop = cluster.laptop
    holder = laptop.start(sys.executable, "-c", HOLDS, log="holder")
    wait(lambda: "held" in laptop.said("holder"), 30, "it does not hold")
    laptop.kill(holder, SIGSTOP)
    began = time.monotonic()
    cluster.expect("up", MODEL, status=BusyError.exit_code, says=", from 1")
    wait(
        lambda: cluster.patchkit("down").status == 0,
        LEASE + 30,
        "the lock is held for ever",
    )
    lost = time.monotonic() - began
    return f"others exit with {BusyError.exit_code}, for {lost:.0f} s"
