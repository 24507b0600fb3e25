"""Functions of patchkit called over a real sshd: words, errors, ends."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkit.cluster.agent import links, node_files
from patchkit.cluster.agent.links import link_words, try_links
from patchkit.cluster.ssh.node import Remote, all_of, everywhere
from patchkit.errors import HostError, UsageError
from patchkit.process import attempt
from patchkit.quoting import visible
from patchkit.reading import read_text
from support import ssh_server

NAMES = ("spark-1", "spark-2", "spark-3")


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    if why := ssh_server.obstacle():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("ssh")
    server = ssh_server.ssh_server(folder / "server", *NAMES)
    with pytest.MonkeyPatch.context() as patch, server as path:
        patch.setenv("PATH", path)
        yield folder / "server"


ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@settings(max_examples=12, deadline=None)
@given(text=ANY)
def test_any_text_arrives_as_it_is(sshd, text):
    assert Remote("spark-1").call(str, visible, text=text) == visible(text)


def test_an_error_is_raised_here_with_the_name_of_the_node(sshd):
    with pytest.raises(UsageError, match=r"^spark-1: .*is no file of a cluster"):
        Remote("spark-1").call(list[str], node_files.put_files, name="x", files={"../evil": ""})


def test_a_failure_of_the_code_there_is_no_traceback(sshd):
    with pytest.raises(HostError, match=r"^spark-1: read_text: \w+Error: ") as caught:
        Remote("spark-1").call(str, read_text, path="/etc/hostname", limit="x")
    assert "Traceback" not in str(caught.value)


def test_several_nodes_at_once_in_their_order(sshd):
    nodes = [Remote(name) for name in (*NAMES, "nowhere.invalid")]
    found = everywhere(nodes, lambda node: node.call(str, visible, text=node.destination))
    assert found[:3] == list(NAMES)
    assert isinstance(found[3], HostError)
    with pytest.raises(HostError, match=r"nowhere\.invalid: "):
        all_of(found)


@pytest.mark.parametrize(
    ("change", "what", "hint"),
    [
        ("known", "Host key verification failed", "ssh spark-1"),
        ("user", "Permission denied", "ssh-copy-id spark-1"),
    ],
)
def test_what_ssh_refuses(sshd, tmp_path, change, what, hint):
    """A key that is not known, a user who is not."""
    (tmp_path / change).write_text("")
    (tmp_path / change).chmod(0o600)
    with (
        replaced(sshd / "config", f"{sshd}/{change}", str(tmp_path / change)),
        pytest.raises(HostError, match=what) as caught,
    ):
        Remote("spark-1").call(str, visible, text="")
    assert hint in caught.value.hint


@contextlib.contextmanager
def replaced(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(f"{old}\n", f"{new}\n"))
    try:
        yield
    finally:
        path.write_text(text)


@pytest.mark.parametrize("destination", ["-oProxyCommand=touch /tmp/evil", "", "a b", "a\nb"])
def test_what_is_no_host(destination):
    with pytest.raises(UsageError, match="is not a host"):
        Remote(destination)


def test_a_stream_ends_there_when_nobody_listens(sshd, tmp_path, monkeypatch):
    """The lock of a cluster is free as soon as its holder has left, even by SIGKILL."""
    monkeypatch.setenv("HOME", str(tmp_path))
    code = (
        "import sys, time; from patchkit.cluster.ssh.node import Remote\n"
        "from patchkit.cluster.agent import links\n"
        "asked = {'address': '127.0.0.1', 'ports': [0]}\n"
        "for said in Remote('spark-2').stream(dict[str, list[int]], links.hold_ports, **asked):\n"
        "    print(said['open'][0], flush=True); time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    port = int(holder.stdout.readline())
    assert links.find_blocked("127.0.0.1", [port]) == []
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    for _ in range(100):
        if links.find_blocked("127.0.0.1", [port]):
            return
        time.sleep(0.1)
    raise AssertionError("it listens still")


def test_a_port_that_is_taken(sshd):
    first = links.hold_ports("127.0.0.1", [0])
    taken = next(first)["open"][0]
    asked = {"address": "127.0.0.1", "ports": [taken, 0]}
    with Remote("spark-1").opened(dict[str, list[int]], links.hold_ports, **asked) as said:
        assert said["taken"] == [taken]
        assert len(said["open"]) == 1


def test_links_go_over_the_address_with_the_key_that_is_known(sshd):
    """The name is not that of the address, and the host key is still looked for under the name."""
    words = link_words("spark-2", "127.0.0.2")
    assert "HostName=127.0.0.2" in words
    done = attempt(*words, "echo $SSH_CONNECTION", timeout=20)
    assert (done.trouble, done.output.split()[2]) == ("", "127.0.0.2")
    (found, lost) = try_links([("spark-2", "127.0.0.2"), ("spark-3", "127.9.9.9")])
    assert found["error"] == {}
    assert lost["error"] == {} or "127.9.9.9" in lost["error"]["what"]


def test_here_needs_no_ssh(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("ssh") is None
    assert Remote("localhost").call(str, visible, text="\x1b") == "\\x1b"
    assert os.environ["PATH"] == str(tmp_path)
