"""Change cluster.toml under a cluster that serves: the order of its nodes, which, its name."""

from __future__ import annotations

from e2e.lifecycle.cluster import (
    MODEL,
    OTHER_MODEL,
    UNIT,
    URL,
    EmulatedCluster,
    insist,
    scenario,
    wait,
)
from e2e.lifecycle.scenarios import REFUSED
from patchkit.errors import UsageError

SWAPPED = ("spark2", "spark1")
IDLE_SECONDS = 20  # after a boot, in which a unit that is enabled would start
OTHER_PORT = 8100


@scenario("serving")
def nodes_swapped(cluster: EmulatedCluster) -> str:
    """Head and worker change places; the former head boots alone; then it leaves the file."""
    cluster.describe(SWAPPED)
    says = ("spark1 is the head of the running start", "up", MODEL)
    cluster.expect("status", status=REFUSED, says=says)
    says = ("another head, than what runs", "patchkit up", OTHER_MODEL)
    cluster.expect("switch", OTHER_MODEL, status=UsageError.exit_code, says=says)
    cluster.expect("up", MODEL)
    cluster.worker.kill()  # the head now
    cluster.head.shut_down()
    cluster.head.boot()
    _insist_idle(cluster, "spark1")
    cluster.worker.boot()
    wait(
        lambda: _answers(cluster, "spark2"),
        cluster.patience,
        "the new head does not serve",
    )
    cluster.expect("down")
    cluster.insist_on_nothing()

    cluster.describe()
    cluster.up()
    cluster.describe(["spark2"])
    cluster.expect("up", MODEL)
    insist(
        not any(cluster.processes("spark1").values()),
        "the former head still has its rank",
    )
    cluster.head.shut_down()
    cluster.head.boot()
    _insist_idle(cluster, "spark1")
    insist(_answers(cluster, "spark2"), "the node that stays does not answer")
    return "no rank starts by itself, neither of a head that is a worker now nor of one that left"


@scenario("serving")
def cluster_renamed(cluster: EmulatedCluster) -> str:
    """Another `name` while it serves: the former one is named, stopped by what is printed."""
    cluster.describe(name="other")
    cure = "ssh -t spark1 'systemctl --user disable --now patchkit-vllm.service'"
    cluster.expect(
        "status", status=REFUSED, says=("other clusters run here: vllm", cure)
    )
    said = cluster.expect("down", says=("other clusters run here: vllm", cure))
    insist("no process left" not in said, f"down says that nothing is left: {said}")
    cluster.expect("up", MODEL, status=REFUSED, says=("of the cluster vllm", cure))
    insist(cluster.answers(), "the former one was disturbed")
    cluster.laptop.run("sh", "-c", cure.replace("ssh -t", "ssh"))
    cluster.up()
    return "`status`, `down` and `up` name it; the printed command stops it, then `up` serves"


@scenario("serving")
def two_clusters(cluster: EmulatedCluster) -> str:
    """Another cluster on the same nodes, with a name and a `port` of its own."""
    cluster.describe(name="second", port=OTHER_PORT)
    cluster.expect("up", MODEL)
    insist(cluster.answers(), "the first one was disturbed")
    insist(_answers(cluster, "spark1", OTHER_PORT), "the second one does not answer")
    cluster.expect("down")
    insist(cluster.answers(), "the first one was stopped with it")
    cluster.describe()
    return "both serve; each is stopped by itself"


def _answers(cluster: EmulatedCluster, name: str, port: int = 8000) -> bool:
    url = URL.replace("8000", str(port))
    ask = ("curl", "--silent", "--fail", "--max-time", "5", f"{url}/v1/models")
    return not cluster.nodes[name].user(*ask).trouble


def _insist_idle(cluster: EmulatedCluster, name: str) -> None:
    """Insist that a node that has booted starts no rank by itself."""
    node = cluster.nodes[name]
    node.user("sleep", str(IDLE_SECONDS))
    state = node.user("systemctl", "--user", "is-active", UNIT).output.strip()
    enabled = node.user("systemctl", "--user", "is-enabled", UNIT).output.strip()
    insist(state == "inactive", f"{name} starts a rank by itself: {state}, {enabled}")
    insist(not any(cluster.processes(name).values()), f"{name} has a rank of its own")
