"""Ask a server from another machine, over a real sshd: the key stays on the node."""

import pytest

from patchkit.cluster.agent.server_answers import ServerAnswers, ask_server, wanted_metrics
from patchkit.cluster.ssh.node import Remote
from patchkit.doctor.server import server_findings
from support import ssh_server
from support.model_server import ModelServer

KEY = "a-key-of-the-node"


@pytest.fixture
def sshd(tmp_path):
    if why := ssh_server.obstacle():
        pytest.skip(why)
    server = ssh_server.ssh_server(tmp_path / "server", "spark-1")
    with pytest.MonkeyPatch.context() as patch, server as path:
        patch.setenv("PATH", path)
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        yield


def test_a_server_is_asked_on_its_node(sshd, tmp_path):
    file = tmp_path / "secrets.env"
    file.write_text(f"VLLM_API_KEY={KEY}\n")
    with ModelServer("0.17", key=KEY) as server:
        node, place = Remote("spark-1"), {"url": server.url, "key_file": str(file)}
        said = node.call(ServerAnswers, ask_server, metrics=wanted_metrics(), **place)
    found = [*server_findings("spark-1", said)]
    assert {each.about: each.level.value for each in found} == {
        "server-token": "ok",
        "server-load": "ok",
    }
    assert said.key == str(file)
    assert KEY not in f"{said} {found}"
