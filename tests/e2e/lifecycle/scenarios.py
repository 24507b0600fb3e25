"""Break something, and insist on what has to come of it. Each scenario has nodes of its own."""

from __future__ import annotations

import time
from collections.abc import Callable

from e2e.lifecycle.cluster import EmulatedCluster, LifecycleLab, Process, insist
from e2e.lifecycle.installing import launcher_killed_in_install, newcomer, upgraded
from e2e.lifecycle.launcher import (
    held,
    launcher_killed_in_switch,
    launcher_killed_in_up,
    second_up,
    ssh_refused,
)
from e2e.lifecycle.refusing import no_linger, switch_cut_short
from e2e.lifecycle.silent import (
    hold_frozen,
    launcher_frozen,
    login_prints_a_title,
    server_hung,
    silent_node,
)
from e2e.lifecycle.starting import (
    gives_up,
    init_in_the_lab,
    odd_words,
    port_taken,
    switch_back,
    wrong_token,
)
from e2e.lifecycle.waiting import cable_cuts, link_killed, other_server, worker_off_long
from e2e.lifecycle.wiring import Net

Scenario = Callable[[LifecycleLab], str]


def up_and_down(lab: LifecycleLab) -> str:
    """`up`, an answer, `up` again, `status`, `down`."""
    with lab.serving("up_and_down") as cluster:
        before = cluster.ranks()
        cluster.up()
        insist(cluster.ranks() == before, "the second up started something anew")
        status = cluster.patchkit("status")
        insist(status.status == 0, f"status: {status.trouble}")
    return "answers; the second up changes nothing; nothing is left"


def three_nodes(lab: LifecycleLab) -> str:
    """The same with three nodes, and a rank killed: the other two are started anew, too."""
    with lab.serving("three_nodes", 3) as cluster:
        return _killed(cluster, "spark3", "main")


def killing(name: str, process: Process, what: str) -> Scenario:
    """Return a scenario in which a process of a node's rank is killed."""

    def scenario(lab: LifecycleLab) -> str:
        with lab.serving(scenario.__name__) as cluster:
            return _killed(cluster, name, process)

    scenario.__doc__ = what
    return scenario


KILLS = {
    "api_server_killed": killing(
        "spark1", "main", "`kill -9` of the head's main process, which is the API server."
    ),
    "head_worker_killed": killing("spark1", "worker", "`kill -9` of the head's worker process."),
    "rank_killed": killing(
        "spark2", "main", "`kill -9` of the other rank's main process; nobody asks anything."
    ),
    "rank_worker_killed": killing(
        "spark2",
        "worker",
        "`kill -9` of the other rank's worker process: its main process ends with status 0.",
    ),
}
for name, made in KILLS.items():
    made.__name__ = name


def worker_lost(lab: LifecycleLab) -> str:
    """The worker node loses power, and comes back after 20 s."""
    with lab.serving("worker_lost") as cluster:
        return _lost(cluster, "spark2")


def head_lost(lab: LifecycleLab) -> str:
    """The head loses power, and comes back after 20 s; its worker must not keep its rank."""
    with lab.serving("head_lost") as cluster:
        return _lost(cluster, "spark1")


def cable_out_5(lab: LifecycleLab) -> str:
    """The cable out for 5 s."""
    with lab.serving("cable_out_5") as cluster:
        return _out(cluster, "qsfp", 5)


def cable_out_60(lab: LifecycleLab) -> str:
    """The cable out for 60 s."""
    with lab.serving("cable_out_60") as cluster:
        return _out(cluster, "qsfp", 60)


def lan_out(lab: LifecycleLab) -> str:
    """The worker's LAN out for 30 s: what serves goes over the cable."""
    with lab.serving("lan_out") as cluster:
        before = cluster.ranks()
        cluster.rack.wires.cut("lan", "spark2")
        time.sleep(30)
        insist(cluster.answers(), "without the LAN it does not answer")
        cluster.rack.wires.join("lan", "spark2")
        time.sleep(2)
        insist(cluster.ranks() == before, "ranks were started anew")
    return "serves all the time, from the same processes"


def disk_full(lab: LifecycleLab) -> str:
    """No byte free on the worker's disk when `up` begins."""
    with lab.prepared("disk_full") as cluster:
        worker = cluster.rack["spark2"]
        worker.fill()
        failed = cluster.patchkit("up", "~/models/tiny")
        said = failed.output + failed.errors
        insist(failed.status != 0 and "spark2" in said, f"up does not name the node: {said}")
        cluster.insist_on_nothing()
        worker.unfill()
        cluster.up()
        cluster.down()
    return "up names the node and leaves nothing; with space it serves"


def rebooted_worker_first(lab: LifecycleLab) -> str:
    """Both nodes rebooted, the worker first."""
    with lab.serving("rebooted_worker_first") as cluster:
        return _rebooted(cluster, "spark2", "spark1")


def rebooted_head_first(lab: LifecycleLab) -> str:
    """Both nodes rebooted, the head first: it waits for its worker."""
    with lab.serving("rebooted_head_first") as cluster:
        return _rebooted(cluster, "spark1", "spark2")


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        *(newcomer, init_in_the_lab, upgraded, up_and_down, three_nodes),
        *KILLS.values(),
        *(worker_lost, head_lost, cable_out_5, cable_out_60, lan_out),
        *(ssh_refused, disk_full, rebooted_worker_first, rebooted_head_first),
        *(launcher_killed_in_up, launcher_killed_in_switch, launcher_killed_in_install),
        *(silent_node, login_prints_a_title, server_hung, launcher_frozen, hold_frozen),
        *(second_up, held, switch_back, gives_up, wrong_token, port_taken, odd_words),
        *(other_server, worker_off_long, cable_cuts, link_killed),
        *(switch_cut_short, no_linger),
    )
}


def _killed(cluster: EmulatedCluster, name: str, process: Process) -> str:
    before = cluster.ranks()
    cluster.kill(name, process)
    return cluster.heals(before)


def _lost(cluster: EmulatedCluster, name: str) -> str:
    before = cluster.ranks()
    cluster.rack[name].kill()
    time.sleep(20)
    (other,) = set(cluster.names) - {name}
    left = cluster.processes(other)["worker"]
    insist(not set(left) & set(before[other]["worker"]), f"20 s later {other} still has its rank")
    cluster.rack[name].boot()
    return cluster.heals()


def _out(cluster: EmulatedCluster, net: Net, seconds: int) -> str:
    before = cluster.ranks()
    cluster.rack.wires.cut(net, "spark2")
    time.sleep(seconds)
    cluster.rack.wires.join(net, "spark2")
    healed = cluster.heals()
    return f"{healed}, {'the same' if cluster.ranks() == before else 'new'} processes"


def _rebooted(cluster: EmulatedCluster, first: str, second: str) -> str:
    for name in (first, second):
        cluster.rack[name].shut_down()
    cluster.rack[first].boot()
    time.sleep(10)
    cluster.rack[second].boot()
    return f"{cluster.heals()} from the second node's boot"
