"""Break a cluster that serves: its processes, power, cables, logins; insist on what comes of it.

That clocks differ is no scenario: all nodes have this machine's. A unit test has offsets.
"""

from __future__ import annotations

import time

from e2e.emulation import wires
from e2e.lifecycle import fake_venv
from e2e.lifecycle.cluster import (
    ANY,
    MODEL,
    ON,
    OTHER_MODEL,
    UNIT,
    URL,
    EmulatedCluster,
    insist,
    scenario,
    wait,
)
from e2e.lifecycle.nodes import HOME
from patchkit.errors import HostError

REFUSED = HostError.exit_code
TITLE = "printf '\\033]0;title\\007'\n"
HANGS = "sleep 1000\n"
GIVES_UP_SECONDS, STOP_SECONDS = 240, 60
LIE_SECONDS = 12
NEW_ADDRESS = "192.168.177.22"
OFF_SECONDS = 90  # of a worker; more than RestartSec, a link's limit and a boot
CUTS = 5  # one more than systemd's starts in an hour
ERROR = "RuntimeError: CUDA error: an illegal memory access was encountered"
OTHER = """\
import http.server, socketserver, sys
socketserver.TCPServer.allow_reuse_port = sys.argv[1] == "shared"
class Other(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        data = b'{"object": "list", "data": [{"id": "somebody-elses/model"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    do_POST = do_GET
http.server.ThreadingHTTPServer(("", 8000), Other).serve_forever()
"""


@scenario("stopped", engines=ANY)
def up_and_down(cluster: EmulatedCluster) -> str:
    """`up`, an answer, `up` again, `status`, `down`; every login prints a terminal's title."""
    for name in cluster.names:
        _write_login(cluster, TITLE, name)
    cluster.up()
    before = cluster.ranks()
    cluster.up()
    insist(cluster.ranks() == before, "the second up started something anew")
    cluster.expect("status")
    return "answers; the second up changes nothing; nothing is left"


@scenario("serving", 3, engines=("podman",))
def three_nodes(cluster: EmulatedCluster) -> str:
    """`kill -9` of a rank's main process on the last of three nodes; nobody asks anything."""
    before = cluster.ranks()
    cluster.kill("spark3", "main")
    return cluster.heals(before)


@scenario("serving", engines=("venv", "podman"))
def process_killed(cluster: EmulatedCluster) -> str:
    """`kill -9` of the head's API server, of its worker process, of the other rank's."""
    told = []
    for name, process in (
        ("spark1", "main"),
        ("spark1", "worker"),
        ("spark2", "worker"),
    ):
        before = cluster.ranks()
        cluster.kill(name, process)
        told.append(cluster.heals(before))
    return "; ".join(told)


@scenario("serving")
def warm_start(cluster: EmulatedCluster) -> str:
    """`switch` and back; then the worker's compiled code is lost, and the head gives it its own."""

    def compiled(name: str = "spark1") -> str:
        journal = ("journalctl", "--user", "--output=cat", "--unit", UNIT)
        said = cluster.nodes[name].user(*journal).output.splitlines()
        return " ".join(line.split()[-1] for line in said if "caching.py" in line)

    for model in (OTHER_MODEL, MODEL):
        cluster.expect("switch", model)
    for name in cluster.names:
        found = compiled(name).split()
        insist(found == ["compiled"] * 3 + ["found"] * 3, f"{name}: {found}")
    cluster.down()
    caches = f"{HOME}/.local/state/patchkit"
    cluster.worker.user("rm", "-r", caches)
    time.sleep(30)  # until files count as whole
    cluster.up()
    listed = ("find", caches, "-type", "f", "-name", "*-of-*")

    def given() -> bool:
        files = [
            set(node.user(*listed).output.split()) for node in cluster.nodes.values()
        ]
        return len(files[1] - files[0]) == 2 and files[0] < files[1]

    wait(given, 60, "the worker has not got what the head has")
    return "each model's code is found again; the worker gets the head's after the first answer"


@scenario("serving", engines=("docker", "podman"))
def container_killed(cluster: EmulatedCluster) -> str:
    """`kill -9` of the engine's client on the head; its `kill` of the worker's container."""
    engine, before = cluster.engine, cluster.ranks()
    cluster.head.user(
        "systemctl", "--user", "kill", "--kill-whom=main", "--signal=KILL", UNIT
    )
    told = [cluster.heals(before)]
    before = cluster.ranks()
    fake_venv.insist_user(cluster.worker, engine, "kill", UNIT.removesuffix(".service"))
    told.append(cluster.heals(before))
    if engine == "docker":
        before = cluster.ranks()
        cluster.head.root("systemctl", "restart", "docker")
        told.append(f"its daemon restarted: {cluster.heals(before)}")
    return "; ".join(told)


@scenario("serving", engines=("podman",))
def head_lost(cluster: EmulatedCluster) -> str:
    """The head loses power, and comes back after 20 s; its worker must not keep its rank."""
    before = cluster.processes("spark2")["worker"]
    cluster.head.kill()
    time.sleep(20)
    left = cluster.processes("spark2")["worker"]
    insist(not set(left) & set(before), "20 s later the worker still has its rank")
    cluster.head.boot()
    return cluster.heals()


@scenario("serving", engines=("docker",))
def worker_lost(cluster: EmulatedCluster) -> str:
    """The worker without power, longer than any limit of a start: its head waits, uncounted."""
    cluster.worker.kill()
    time.sleep(OFF_SECONDS)
    unit, watch, *_ = cluster.head_status()["units"]
    insist(unit["sub"] == "waiting", f"the head is {unit}")
    insist(
        watch["text"].startswith("waiting for spark2: "), f"it says {watch['text']!r}"
    )
    cluster.worker.boot()
    healed = cluster.heals()
    starts = cluster.head_status()["starts"]
    insist(starts <= 2, f"{starts} starts")
    return f"off for {OFF_SECONDS} s: `status` says what is waited for; {healed}"


@scenario("serving")
def worker_flickers(cluster: EmulatedCluster) -> str:
    """The worker is back before 15 s of silence, four times without power, once rebooted."""
    active = ("systemctl", "--user", "--quiet", "is-active", UNIT)
    for cut in (cluster.worker.kill,) * (CUTS - 1) + (cluster.worker.shut_down,):
        before = cluster.ranks()
        cut()
        cluster.worker.boot()
        cluster.heals(before)
        # A link that is lost under a load does count: that may be the model's doing.
        wait(
            lambda: not cluster.head.user(*active).trouble,
            STOP_SECONDS,
            "it is not active",
        )
    starts = cluster.head_status()["starts"]
    insist(starts <= 2, f"{starts} starts count")
    return f"serves again after each; {starts} starts count"


@scenario("serving", engines=("docker",))
def rebooted(cluster: EmulatedCluster) -> str:
    """Both nodes rebooted, the worker first, then the head first: it waits for its worker."""
    told = []
    for first, second in (
        (cluster.worker, cluster.head),
        (cluster.head, cluster.worker),
    ):
        first.shut_down()
        second.shut_down()
        first.boot()
        time.sleep(10)
        second.boot()
        told.append(cluster.heals())
    return f"{'; '.join(told)} from the second node's boot"


@scenario("serving")
def cable_cuts(cluster: EmulatedCluster) -> str:
    """The cable out for 5 s; then for 20 s, more often than a model may crash in an hour."""
    for seconds in (5, *[20] * CUTS):
        before = cluster.ranks()
        cluster.wires.cut("qsfp", "spark2")
        time.sleep(seconds)
        cluster.wires.join("qsfp", "spark2")
        cluster.heals(before if seconds > 5 else None)
    return f"serves again after each; {cluster.head_status()['starts']} starts count"


@scenario("serving")
def status_knows(cluster: EmulatedCluster) -> str:
    """A full disk while it serves; then the worker has another address on the cable."""
    worker = cluster.worker
    worker.fill()
    cluster.expect("status", says=("full spark2", "0 MB are free"))
    worker.unfill()

    netdev = wires.halves(worker.number)[0]
    given = f"{wires.qsfp_ip(worker.number)}/24"
    before = cluster.ranks()
    worker.root("ip", "address", "add", f"{NEW_ADDRESS}/24", "dev", netdev)
    worker.root("ip", "address", "del", given, "dev", netdev)
    wait(
        lambda: cluster.head_status()["units"][0]["sub"] == "waiting",
        120,
        "it does not wait",
    )
    cure = "next: correct `address` of spark2 in cluster.toml"
    said = cluster.patchkit("status").output
    insist(
        all(
            word in said for word in ("no longer has 192.168.177.2", NEW_ADDRESS, cure)
        ),
        said,
    )
    worker.root("ip", "address", "add", given, "dev", netdev)
    healed = cluster.heals(before)
    return f"`status` names both, and the new address; with the former one it {healed}"


@scenario("serving")
def lan_out(cluster: EmulatedCluster) -> str:
    """The worker's LAN out for 30 s: what serves goes over the cable."""
    before = cluster.ranks()
    cluster.wires.cut("lan", "spark2")
    time.sleep(30)
    insist(cluster.answers(), "without the LAN it does not answer")
    cluster.wires.join("lan", "spark2")
    time.sleep(2)
    insist(cluster.ranks() == before, "ranks were started anew")
    return "serves all the time, from the same processes"


@scenario("serving")
def silent_node(cluster: EmulatedCluster) -> str:
    """The worker's login hangs, then it has no power: `status`, `logs`, `up` name it and end."""
    _write_login(cluster, HANGS, "spark2")
    began = time.monotonic()
    _name_silent(cluster, "no sign of life")
    took = time.monotonic() - began
    _write_login(cluster, "", "spark2")
    cluster.worker.kill()
    _name_silent(cluster, "ssh: connect")
    cluster.worker.boot()
    cluster.heals()
    return f"all exit with {REFUSED} and show the head; with a login that hangs in {took:.0f} s"


def _name_silent(cluster: EmulatedCluster, why: str) -> None:
    cluster.expect("status", status=REFUSED, says=("no state spark2", why, "GiB free"))
    cluster.expect("logs", "-n", "5", status=REFUSED, says=("spark1", why))
    cluster.expect("up", MODEL, status=REFUSED, says="spark2")


def _write_login(cluster: EmulatedCluster, text: str, name: str) -> None:
    fake_venv.write(cluster.nodes[name], f"{HOME}/.bashrc", text)


@scenario("stopped", engines=("docker",))
def gives_up(cluster: EmulatedCluster) -> str:
    """A model that fails on the worker while loading, each time."""
    cluster.change(FAIL=ERROR, FAIL_RANK=1)
    cluster.expect("up", MODEL, status=REFUSED, says=("spark2", ERROR))

    def gave_up() -> bool:
        return (
            cluster.head.user("systemctl", "--user", "is-failed", UNIT).output
            == "failed\n"
        )

    wait(gave_up, GIVES_UP_SECONDS, "systemd tries on")
    starts = cluster.head_status()["starts"]
    insist(starts == 4, f"{starts} starts")
    said = cluster.patchkit("status").output
    insist(
        "systemd gave up" in " ".join(said.split()), f"status does not say so: {said}"
    )
    # Systemd began the worker for the start that it then refused, and stops it.
    wait(lambda: not cluster.left(ON), STOP_SECONDS, "processes or units are left")
    cluster.change()
    cluster.up()
    return (
        f"`up` exits with {REFUSED} and that rank's error; {starts} starts, then failed"
    )


@scenario("stopped", engines=("podman",))
def wrong_token(cluster: EmulatedCluster) -> str:
    """`/health` says 200 long before anything is answered."""
    cluster.change(LIE=LIE_SECONDS)
    began = cluster.laptop.start_patchkit("up", MODEL, log="up")
    healthy = ("curl", "--silent", "--fail", "--max-time", "2", f"{URL}/health")
    wait(lambda: not cluster.head.user(*healthy).trouble, 60, "no /health")
    time.sleep(LIE_SECONDS / 2)
    state = cluster.head.user("systemctl", "--user", "is-active", UNIT).output.strip()
    insist(state == "activating", f"the unit is {state} before a token came")
    insist(began.poll() is None, "up returned before a token came")
    insist(began.wait() == 0, cluster.laptop.said("up"))
    insist(cluster.answers(), "up returned, and it does not answer")
    return "activating until a token came; then `up` returns"


@scenario("stopped")
def other_server(cluster: EmulatedCluster) -> str:
    """Another server on the API server's port; then one that shares it, before and after."""
    own = ("/usr/bin/python3", "-c", OTHER)
    for kind in ("alone", "shared"):
        cluster.head.start_other(8000, *own, kind)
        cluster.expect("up", MODEL, status=REFUSED, says="8000: python3")
        cluster.insist_on_nothing()
        cluster.head.stop_other()
    cluster.up()
    cluster.head.start_other(8000, *own, "shared")
    cluster.expect("status", status=REFUSED, says="python3")
    cluster.expect("up", MODEL, status=REFUSED, says="python3")
    cluster.kill("spark1", "main")
    journal = ("journalctl", "--user", "--quiet", "--output=cat", "--unit", UNIT)
    named = "port is taken: "
    wait(
        lambda: named in cluster.head.user(*journal).output,
        60,
        "the unit does not name it",
    )
    insist(
        not cluster.processes("spark1")["main"], "a rank runs beside the other server"
    )
    cluster.head.stop_other()
    cluster.heals()
    return "`up`, `status` and the unit name it; nothing starts beside it"


@scenario("stopped", engines=("docker",))
def link_killed(cluster: EmulatedCluster) -> str:
    """`kill -9` of the worker's end of the link while the head is off, and `down` meanwhile."""
    for gone in (True, False):
        cluster.up()
        cluster.head.kill()
        if gone:
            cluster.worker.user("pkill", "-KILL", "-f", "group.py held")
            wait(
                lambda: not any(cluster.processes("spark2").values()),
                8,
                "the rank stays",
            )
        cluster.expect("down", status=REFUSED, says="spark1")
        insist(
            not any(cluster.processes("spark2").values()), "down left the worker's rank"
        )
        cluster.head.boot()
        cluster.heals()
        cluster.down()
    return f"the rank ends with it; `down` stops the worker, and exits with {REFUSED}"
