"""Ask ssh itself what it makes of the words of a command, beside a user's own configuration."""

import subprocess

import pytest

from patchkit.cluster.ssh.ssh import ssh_words
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
