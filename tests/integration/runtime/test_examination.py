"""Ask a node as doctor does: this machine, over the way that the launcher takes."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patchkit.cluster.agent import processes
from patchkit.cluster.agent.node_facts import model_print, python_contents
from patchkit.cluster.agent.node_state import group_processes, listeners
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.cluster_file import ClusterNode
from patchkit.cluster.openai.server_answers import ask_server
from patchkit.doctor.cluster_checks import cluster_findings
from patchkit.doctor.examination import _add_image, examine_nodes
from patchkit.doctor.peers.node_report import NodeReport
from patchkit.finding import Level
from support import write_files
from support.clusters import image_facts, node_facts
from support.needed import need

NAME = f"test-{os.getpid()}"


def test_a_process_that_is_stopped():
    environment = {**os.environ, "PATCHKIT_CLUSTER": NAME}
    words = [sys.executable, "-c", "input()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, env=environment) as process:
        time.sleep(0.1)
        process.send_signal(signal.SIGSTOP)
        state, deadline = "", time.monotonic() + 5
        while state != "T" and time.monotonic() < deadline:
            found = list(group_processes(NAME))
            state = found[0].state if found else ""
        process.kill()
    assert [(each.pid, each.state, each.name[:6]) for each in found] == [
        (process.pid, "T", "python")
    ]


@pytest.mark.skipif(not shutil.which("ss"), reason="ss is not installed (iproute2)")
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_who_listens(address):
    own = Path("/proc/self/cgroup").read_text().splitlines()[-1].rpartition("/")[2]
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        found = [each for each in listeners([port]) if each.address == address]
        url = f"http://127.0.0.1:{port}"
        (other,) = processes.strangers(url, "patchkit-none.service")
        assert other.startswith(f"{address} port {port}: python")
        assert str(os.getpid()) in other
        assert processes.strangers(url, own) == []
        elsewhere = processes.strangers(f"http://127.0.0.3:{port}", "x")
        assert elsewhere == [other] * (address == "0.0.0.0")
    assert processes.strangers(url, "x") == []
    assert [(each.port, each.pid) for each in found] == [(port, os.getpid())]


@pytest.mark.skipif(not shutil.which("ss"), reason="ss is not installed (iproute2)")
@pytest.mark.parametrize(
    ("listening", "asked"),
    [("::ffff:127.0.0.1", "127.0.0.1"), ("::ffff:0.0.0.0", "127.0.0.1")],
)
def test_who_listens_at_ipv4_by_a_socket_of_ipv6(listening, asked):
    with socket.socket(socket.AF_INET6) as server:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind((listening, 0))
        server.listen()
        port = server.getsockname()[1]
        assert processes.strangers(f"http://{asked}:{port}", "patchkit-none.service")


@pytest.mark.parametrize(
    ("said", "address", "user"),
    [
        ("[::1]%lo:8000 [::]:* uid:1001 ino:7 sk:2 cgroup:/", "::1", 1001),
        ("127.0.0.1%lo:8000 0.0.0.0:* ino:7 sk:2 cgroup:/", "127.0.0.1", 0),
        ("*:8000 *:* uid:1001 ino:7 sk:2 cgroup:/a uid:0 ino:1 sk:2", "::", 1001),
        (
            '*:8000 *:* users:(("x uid:0 ino:1",pid=5,fd=3)) uid:1001 ino:7 sk:2',
            "::",
            1001,
        ),
    ],
)
def test_whatever_ss_says_of_a_listener(tmp_path, monkeypatch, said, address, user):
    write_files(
        tmp_path,
        {"ss": f"#!/bin/sh\ncat <<'END'\nLISTEN 0 128 {said}\nEND\n"},
        mode=0o755,
    )
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (listener,) = processes.find_listeners([8000])
    assert (listener.address, listener.user) == (address, user)


def test_a_digest_is_of_what_was_installed_and_not_of_where_it_came_from(tmp_path):
    digests = []
    for number, extra in enumerate(("", "direct_url.json,sha256=x,3", "RECORD,,")):
        home = (
            tmp_path / f"{number}/lib/python3.11/site-packages/torch-2.11.0.dist-info"
        )
        rows = ["torch/a.py,sha256=abc,1", "../../../bin/x,sha256=y,2"]
        rows += [f"torch-2.11.0.dist-info/{extra}"] * bool(extra)
        lines = "".join(f"{row}\n" for row in rows[:: 1 - 2 * (number % 2)])
        write_files(
            home, {"METADATA": "Name: torch\nVersion: 2.11.0\n", "RECORD": lines}
        )
        found = python_contents([str(home.parent)], None)
        assert found.versions == {"torch": "2.11.0"}
        digests.append(found.digests["torch"])
    assert len(digests[0]) == 64
    assert len({*digests}) == 1


def test_a_models_files(tmp_path):
    write_files(tmp_path, {"config.json": "{}", "sub/t.json": "{}", ".cache/x": ""})
    found = model_print(str(tmp_path))
    assert (found.files, found.size) == (2, 4)
    assert "no weights" in found.problem
    (tmp_path / ".cache/x").write_text("other")
    assert model_print(str(tmp_path)) == found
    (tmp_path / "config.json").write_text("[]")
    assert model_print(str(tmp_path)).digest != found.digest


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ('{"architectures": ["A", "B"]}', ("A", "B")),
        ('{"architectures": ["A", 5]}', ()),
        ('{"architectures": "A"}', ()),
        ("[]", ()),
        ("{", ()),
        (None, ()),
    ],
)
def test_the_architectures_of_a_folder(tmp_path, config, names):
    write_files(tmp_path, {"config.json": config} if config else {"other": ""})
    assert model_print(str(tmp_path)).architectures == names


def test_an_image_whose_python_does_not_answer_names_its_cuda(tmp_path):
    image = image_facts("podman", problem="image-silent")
    report = NodeReport(
        node="localhost", facts=node_facts(tmp_path, vllm="", image=image)
    )
    found = _add_image(report)
    assert (found.facts.host.software.cuda, len(found.disks)) == ("13.0", 1)


def test_this_machine_beside_a_node_that_ssh_does_not_reach():
    """Nothing is raised, whatever this machine has, and what is wrong is said first."""
    need("ssh")
    nodes = (ClusterNode(ssh="localhost"), ClusterNode(ssh="nobody@nowhere.invalid"))
    file = Cluster(members=nodes, name="nothing-has-this")
    here, nowhere = examine_nodes(file)
    assert (here.silence, here.facts is None) == (None, False)
    assert "nowhere.invalid" in nowhere.silence.what
    found = cluster_findings(file, [here, nowhere])
    levels = [each.level for each in found]
    first_later = next(
        n for n, each in enumerate(levels) if each in (Level.UNKNOWN, Level.OK)
    )
    assert not {Level.ERROR, Level.WARNING} & {*levels[first_later:]}


LISTENS = """
import http.server, sys
class Spy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print(self.path, self.headers["Authorization"], flush=True)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "m"}]}')
    do_POST = do_GET
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Spy)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.mark.skipif(
    os.getuid() != 0, reason="only root starts a process of another user"
)
@pytest.mark.skipif(not shutil.which("ss"), reason="ss is not installed (iproute2)")
@pytest.mark.parametrize(("user", "sent"), [(0, True), (65534, False)])
def test_the_key_goes_to_no_process_of_another_user(monkeypatch, user, sent):
    monkeypatch.setenv("VLLM_API_KEY", "sk-CANARY")
    # One that every user may run, as an environment's may not be.
    words = [
        shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable,
        "-c",
        LISTENS,
    ]
    with subprocess.Popen(
        words, user=user, stdout=subprocess.PIPE, text=True, cwd="/"
    ) as spy:
        url = f"http://127.0.0.1:{spy.stdout.readline().strip()}"
        said = ask_server(url, key_file="/nonexistent", seconds=1)
        spy.kill()
        seen = spy.stdout.read()
    assert ("sk-CANARY" in seen) is sent
    assert bool(said.strangers) is not sent
    assert "/v1/models" in seen
