"""Ask ssh what it makes of the words of a command; say what a failure of ssh means."""

import subprocess

import pytest

from patchkit.cluster.ssh.ssh import explain_failure, ssh_words
from support.needed import need

CONFIG = """\
Host worker
  HostName 192.168.100.11
  User nvidia
  ForwardAgent yes
  ForwardX11 yes
  ControlMaster auto
  LocalForward 18000 localhost:8000
  RemoteForward 19000 localhost:9000
  DynamicForward 1080
  Tunnel yes
  RemoteCommand tmux new -A
"""


@pytest.mark.parametrize("options", [(), ("-o", "ControlMaster=no")])
def test_nothing_of_a_login_is_forwarded(options, tmp_path):
    need("ssh")
    config = tmp_path / "config"
    config.write_text(CONFIG)
    program, *words = ssh_words("worker", *options)
    told = subprocess.run(
        [program, "-F", config, "-G", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = dict(line.partition(" ")[::2] for line in told.stdout.splitlines())

    assert rows["hostname"] == "192.168.100.11"
    assert rows["user"] == "nvidia"
    assert rows["batchmode"] == "yes"
    assert rows["controlmaster"] == ("false" if options else "auto")
    assert (rows["forwardagent"], rows["forwardx11"]) == ("no", "no")
    assert rows["clearallforwardings"] == "yes"
    assert rows["tunnel"] == "false"
    assert "remotecommand" not in rows


@pytest.mark.parametrize(
    ("line", "reason", "hint"),
    [
        ("no sign of life for 30 s", "sshd answers, and then", "`ssh -v spark-2 true`"),
        ("ssh: connect to host a port 22: No route", "no sshd answers", "ping spark-2"),
        ("ssh: connect to host a: Connection refused", "no sshd listens", "start ssh"),
    ],
)
def test_a_login_that_hangs_is_not_taken_for_a_node_that_is_off(line, reason, hint):
    why, cure = explain_failure(line, "spark-2")
    assert why.startswith(reason)
    assert hint in cure
