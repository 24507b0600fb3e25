"""`patchkit net plan`, and its file as `install` puts it where netplan reads."""

import json
import shlex
import stat
import subprocess
from pathlib import Path

import pytest

from patchkit.cluster.net.netplan_file import OURS
from support import hosts, networks, write_files


@pytest.fixture
def root(tmp_path):
    """A Spark with one cable, and somebody else's netplan file."""
    made = hosts.build(tmp_path, "ipv6_only", node=1)
    others = "network:\n  version: 2\n  renderer: NetworkManager\n"
    place = "etc/netplan/01-network-manager-all.yaml"
    return write_files(made, {place: others}, mode=0o600)


@pytest.fixture
def plan(cli, root, monkeypatch, tmp_path):
    """Run `patchkit net plan` on that root."""
    monkeypatch.chdir(tmp_path)

    def run(options="", **how):
        return cli("net", "plan", "--root", root, *options.split(), **how)

    return run


def pasted(said, where="", since="net"):
    """Return the words of a next step, without those that start this patchkit."""
    line = next(each for each in said.splitlines() if each.startswith(f"next{where}: "))
    words = shlex.split(line)
    return words[words.index(since) :]


def installed(said):
    """Run the next step without sudo: the root is no machine's, so it ends before netplan."""
    subprocess.run(pasted(said, since="sudo")[1:], check=True)


def test_written_installed_and_planned_again(cli, plan, root):
    planned = json.loads(plan("--role head --json").stdout)
    assert (planned["verdict"], planned["file"]) == (
        "2 of 2 interfaces to change",
        None,
    )
    said = plan("--role head").stdout
    assert pasted(said)[-2:] == ["-o", "40-patchkit.yaml"]
    done = json.loads(cli(*pasted(said), "--json").stdout)
    assert done["outcome"] == "created"
    mine = Path("40-patchkit.yaml")
    assert mine.read_text() == done["yaml"] == planned["yaml"]
    assert stat.S_IMODE(mine.stat().st_mode) == 0o600
    installed(plan("--role head -o 40-patchkit.yaml").stdout)
    assert (root / OURS).read_text() == planned["yaml"]
    assert stat.S_IMODE((root / OURS).stat().st_mode) == 0o600
    # The file says which node this is and what it has, so nobody has to say it again.
    assert plan().stdout.startswith("this network is fine already: nothing to do\n")
    assert (
        "is there already, with another"
        in plan("--mtu 1500 -o 40-patchkit.yaml", rc=2).stderr
    )
    said = plan("--mtu 1500 -o 40-patchkit.yaml --force").stdout
    assert "192.168.101.10/24  MTU 1500 (was 9000)" in said
    installed(said)
    assert (root / OURS).read_text() == planned["yaml"].replace(
        "mtu: 9000", "mtu: 1500"
    )
    assert (root / f"{OURS}~").read_text() == planned["yaml"]
    assert "add  enp1s0f0np0    192.168.100.11/24" in plan("--role worker").stdout


def test_a_file_of_ours_that_may_not_be_read_is_not_replaced(plan, root):
    """A folder stands for it: root may read any file."""
    (root / OURS).mkdir()
    said = plan("--role head")
    assert f"only root may read {root / OURS}: whether" in said.stderr
    assert "192.168.101.10/24" in said.stdout
    said = plan("--role head -o 40-patchkit.yaml", rc=9).stderr
    assert f"next: sudo chmod a+r {root / OURS}, and plan again" in said
    assert not Path("40-patchkit.yaml").exists()


def test_another_file_fights_it(plan, root):
    other = root / "etc/netplan/50-cloud-init.yaml"
    other.write_text("network:\n  ethernets:\n    enp1s0f0np0:\n      dhcp4: true\n")
    said = plan("--role head -o 40-patchkit.yaml", rc=9).stderr
    assert "50-cloud-init.yaml:3: also configures enp1s0f0np0" in said
    assert not Path("40-patchkit.yaml").exists()


def test_options_that_make_no_sense(plan):
    for options, says in {
        "": "--role head",
        "--role worker --nodes 3": "--node 2 to --node 3",
        "--role worker --node 1": "--node 1 is the head",
        "--role head --network 192.168.100.1/24": "has host bits set",
    }.items():
        assert says in plan(options, rc=2).stderr


def test_the_head_and_then_the_worker_by_what_each_plan_prints(
    cli, tmp_path, monkeypatch
):
    """Every `next:` is pasted. The head has numbers of its owner's, the worker has none yet."""
    monkeypatch.chdir(tmp_path)
    head, worker = (
        networks.build(tmp_path, name) for name in ("thirteen", "fresh_port1")
    )
    said = cli(
        "net", "plan", "--root", head, "--role", "head", "-o", "head.yaml"
    ).stdout
    assert said.startswith("this network is fine already: nothing to do\n")
    assert not Path("head.yaml").exists()
    verified = cli(*pasted(said)).stdout
    assert "fine" in verified.splitlines()[-1]
    there = pasted(said, ", on the other node, if it has no address yet")
    said = cli(*there, "--root", worker).stdout
    assert (
        "add  enp1s0f1np1    192.168.11.11/24  MTU 9000  cage 1, twin A, to node 1"
        in said
    )
    cli(*pasted(said))
    assert "192.168.12.11/24" in Path("40-patchkit.yaml").read_text()
