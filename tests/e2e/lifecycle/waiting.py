"""Let a cluster wait, for a worker or for its port, and see what systemd counts meanwhile."""

from __future__ import annotations

import json
import time
from typing import Any

from e2e.lifecycle.cluster import MODEL, EmulatedCluster, LifecycleLab, insist, wait
from patchkit.errors import HostError

UNIT = "patchkit-vllm.service"
PORT = 8000
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
CUTS = 5  # one more than systemd's starts in an hour
OFF_SECONDS = 90  # of a worker; more than RestartSec, a link's limit and a boot


def other_server(lab: LifecycleLab) -> str:
    """Another server on the API server's port; then one that shares it, before and after."""
    with lab.prepared("other_server") as cluster:
        for kind in ("alone", "shared"):
            _other(cluster, kind)
            failed = cluster.patchkit("up", MODEL)
            insist(failed.status == HostError.exit_code, f"up: status {failed.status}")
            insist(f"{PORT}: python3" in failed.errors, f"up does not name it: {failed.errors}")
            cluster.insist_on_nothing()
            _end_other(cluster)
        cluster.up()
        _other(cluster, "shared")
        for words in (("status",), ("up", MODEL)):
            said = cluster.patchkit(*words)
            text = said.output + said.errors
            insist(said.status == HostError.exit_code, f"{words[0]}: status {said.status}: {text}")
            insist("python3" in text, f"{words[0]} does not name it: {text}")
        cluster.kill("spark1", "main")
        head = cluster.rack["spark1"]
        journal = ("journalctl", "--user", "--quiet", "--output=cat", "--unit", UNIT)
        named = "port is taken: "
        wait(lambda: named in head.user(*journal).output, 60, "the unit does not name it")
        insist(not cluster.processes("spark1")["main"], "a rank runs beside the other server")
        _end_other(cluster)
        cluster.heals()
        cluster.down()
    return "`up`, `status` and the unit name it; nothing starts beside it"


def worker_off_long(lab: LifecycleLab) -> str:
    """The worker without power, longer than any limit of a start: its head waits, uncounted."""
    with lab.serving("worker_off_long") as cluster:
        worker = cluster.rack["spark2"]
        worker.kill()
        time.sleep(OFF_SECONDS)
        unit, watch, *_ = _head(cluster)["units"]
        insist(unit["sub"] == "waiting", f"the head is {unit}")
        insist(watch["text"].startswith("waiting for spark2: "), f"it says {watch['text']!r}")
        worker.boot()
        healed = cluster.heals()
        starts = _head(cluster)["starts"]
        insist(starts <= 2, f"{starts} starts")
    return f"off for {OFF_SECONDS} s: `status` says what is waited for; {healed}"


def cable_cuts(lab: LifecycleLab) -> str:
    """The cable out for 20 s, more often than a model may crash in an hour."""
    with lab.serving("cable_cuts") as cluster:
        for _ in range(CUTS):
            before = cluster.ranks()
            cluster.rack.wires.cut("qsfp", "spark2")
            time.sleep(20)
            cluster.rack.wires.join("qsfp", "spark2")
            cluster.heals(before)
        starts = _head(cluster)["starts"]
    return f"serves again after each of {CUTS}; {starts} starts count"


def link_killed(lab: LifecycleLab) -> str:
    """`kill -9` of the worker's end of the link while the head is off, and `down` meanwhile."""
    with lab.prepared("link_killed") as cluster:
        head, worker = cluster.rack["spark1"], cluster.rack["spark2"]
        for gone in (True, False):
            cluster.up()
            head.kill()
            if gone:
                worker.user("pkill", "-KILL", "-f", "group.py held")
                wait(lambda: not any(cluster.processes("spark2").values()), 8, "the rank stays")
            done = cluster.patchkit("down")
            insist(done.status == HostError.exit_code, f"down: status {done.status}")
            insist("spark1" in done.errors, f"down does not name the head: {done.errors}")
            insist(not any(cluster.processes("spark2").values()), "down left the worker's rank")
            head.boot()
            cluster.heals()
            cluster.down()
    return "the rank ends with it; `down` stops the worker, and exits with 9"


def _other(cluster: EmulatedCluster, kind: str) -> None:
    head = cluster.rack["spark1"]
    head.user("systemd-run", "--user", "--unit=other", "/usr/bin/python3", "-c", OTHER, kind)
    busy = ("sh", "-c", "ss -Hltnp 'sport = :8000' | grep -q '\"python3\"'")
    wait(lambda: not head.user(*busy).trouble, 20, "nobody listens")


def _end_other(cluster: EmulatedCluster) -> None:
    cluster.rack["spark1"].user("systemctl", "--user", "stop", "other")


def _head(cluster: EmulatedCluster) -> dict[str, Any]:
    """Return what `status` says of the head."""
    found: dict[str, Any] = json.loads(cluster.patchkit("status", "--json").output)["nodes"][0]
    return found
