"""Functions of patchkit called over a real sshd: words, errors, ends."""

import contextlib
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkit.cluster.agent import node_files
from patchkit.cluster.agent.node_facts import try_links
from patchkit.cluster.ssh.node import Remote
from patchkit.errors import BusyError, HostError, UsageError
from patchkit.process import attempt
from patchkit.quoting import visible
from patchkit.reading import read_text
from support import ssh_server, write_files

NAMES = ("spark-1", "spark-2", "spark-3")
HOLDS = """\
import time
from patchkit.cluster.agent import node_files
from patchkit.cluster.ssh.node import Remote
with Remote("spark-2").opened(bool, node_files.hold_alone, name="x"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    if why := ssh_server.obstacle():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("ssh")
    (folder / "home").mkdir()
    server = ssh_server.ssh_server(
        folder / "server", *NAMES, homes={"spark-2": folder / "home"}
    )
    with pytest.MonkeyPatch.context() as patch, server as path:
        patch.setenv("PATH", path)
        yield folder / "server"


@settings(max_examples=6, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_arrives_as_it_is(sshd, text):
    assert Remote("spark-1").call(str, visible, text=text) == visible(text)


def test_an_error_there_is_raised_here_with_the_name_of_the_node(sshd):
    with pytest.raises(UsageError, match=r"^spark-2: .*is no file of a cluster"):
        Remote("spark-2").call(
            object, node_files.put_files, name="x", files={"../evil": ""}
        )
    with pytest.raises(HostError, match=r"^spark-1: read_text: \w+Error: ") as caught:
        Remote("spark-1").call(str, read_text, path="/etc/hostname", limit="x")
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "what", "hint"),
    [
        ("known", "Host key verification failed", "ssh spark-1"),
        ("user", "Permission denied", "ssh-copy-id spark-1"),
    ],
)
def test_what_ssh_refuses(sshd, tmp_path, change, what, hint):
    """A key that is not known, a user who is not."""
    write_files(tmp_path, {change: ""}, mode=0o600)
    config = (sshd / "config").read_text()
    other = config.replace(f"{sshd}/{change}\n", f"{tmp_path}/{change}\n")
    assert other != config
    (sshd / "config").write_text(other)
    with pytest.raises(HostError, match=what) as caught:
        Remote("spark-1").call(str, visible, text="")
    (sshd / "config").write_text(config)
    assert hint in caught.value.hint


def test_a_lock_there_is_free_when_its_holder_is_killed(sshd):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(BusyError, match=", from 127"), lock_of_x():
            pass
        holder.send_signal(signal.SIGKILL)
    for _ in range(20):
        with contextlib.suppress(BusyError), lock_of_x():
            return
        time.sleep(0.1)
    raise AssertionError("it is held still")


def lock_of_x():
    return Remote("spark-2").opened(bool, node_files.hold_alone, name="x")


def test_links_go_over_the_address_with_the_key_that_is_known(sshd):
    """The name is not that of the address, and the host key is still looked for under the name."""
    (found, lost) = try_links([("spark-1", "127.0.0.2"), ("spark-3", "127.9.9.9")])
    assert "HostName=127.0.0.2" in found.words
    done = attempt(*found.words, "echo $SSH_CONNECTION", timeout=20)
    assert (done.trouble, done.output.split()[2]) == ("", "127.0.0.2")
    assert found.error == {}
    assert lost.error == {} or "127.9.9.9" in lost.error["what"]
