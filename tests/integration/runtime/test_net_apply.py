"""`patchkit net apply` and `undo`: below a root, killed everywhere, and on a live network.

The live one is a network namespace with a mount namespace of its own, where a small program stands
in for netplan: systemd does not run there.
"""

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from patchkit.cluster.net import net_history
from patchkit.cluster.net.net_history import NetHistory
from patchkit.cluster.net.netplan_file import render_netplan
from patchkit.cluster.net.plan import NetPlanOptions, make_net_plan
from patchkit.runtime.host.probe import probe
from support import hosts, networks, write_files
from support.faults import in_child, kill

OURS = Path("etc/netplan/40-patchkit.yaml")
LIVE_STATE = "/var/lib/patchkit/net"
LINKS = ("lan0", "lan1", "enp1s0f0np0", "enP2p1s0f0np0", "first", "second")


@pytest.fixture
def root(tmp_path):
    """A Spark with one cable, and somebody else's netplan file."""
    made = hosts.build(tmp_path, "ipv6_only", node=1)
    others = "network:\n  version: 2\n  renderer: NetworkManager\n"
    place = "etc/netplan/01-network-manager-all.yaml"
    return write_files(made, {place: others}, mode=0o600)


@pytest.fixture
def net(cli, root):
    """Run `patchkit net VERB` on that root."""

    def run(verb, *arguments, **options):
        return cli("net", verb, "--root", root, *arguments, **options)

    return run


def files(root):
    """Everything below etc and var that is a file: its bytes and mode."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), stat.S_IMODE(path.stat().st_mode))
        for folder in ("etc", "var")
        for path in sorted((root / folder).rglob("*"))
        if path.is_file()
    }


def test_applied_and_undone_step_by_step(net, root):
    before = files(root)
    planned = json.loads(net("plan", "--role", "head", "--json").stdout)
    assert planned["verdict"] == "2 of 2 interfaces change"
    asked = json.loads(net("apply", "--role", "head", "--json", rc=2).stdout)["error"]
    assert asked["next"] == "--yes"  # without a terminal it does not ask
    assert files(root) == before
    done = json.loads(net("apply", "--role", "head", "--yes", "--json").stdout)
    assert (done["changed"], done["live"], done["recovered"]) == (True, False, False)
    assert "+        - 192.168.101.10/24" in done["difference"]
    assert done["yaml"] == (root / OURS).read_text() == planned["yaml"]
    assert stat.S_IMODE((root / OURS).stat().st_mode) == 0o600
    first = files(root)
    assert {name: first[name] for name in before} == before
    # Which node this is has been noted, so nobody has to say it again.
    assert net("plan").stdout.startswith("this network is fine already: nothing to do\n")
    assert "is as planned\nnothing to do" in net("apply", "--yes").stdout
    assert files(root) == first
    said = net("apply", "--role", "worker", "--mtu", "1500", "--yes").stdout
    assert "-      mtu: 9000\n+      mtu: 1500" in said
    assert "the root is not /: no network was changed" in said
    assert json.loads(net("undo", "--json").stdout)["changed"]
    assert files(root) == first
    assert "is gone, as before" in net("undo").stdout
    assert files(root) == before
    assert "nothing to undo" in net("undo", rc=2).stderr


def test_a_file_that_somebody_wrote_or_edited(net, root):
    """It is not touched; with --force it is, and comes back byte by byte."""
    (root / OURS).write_bytes(b"# mine\r\nnetwork: {version: 2}\n\n")
    (root / OURS).chmod(0o640)
    before = files(root)
    assert "is not as patchkit left it" in net("apply", "--role", "head", "--yes", rc=4).stderr
    assert files(root) == before
    net("apply", "--role", "head", "--yes", "--force")
    written = (root / OURS).read_bytes()
    (root / OURS).write_bytes(written + b"# edited\n")
    edited = files(root)
    assert "edited since patchkit wrote it" in net("undo", rc=4).stderr
    assert "is not as patchkit left it" in net("apply", "--role", "worker", "--yes", rc=4).stderr
    assert files(root) == edited
    (root / OURS).write_bytes(written)
    net("undo")
    assert files(root) == before


def test_what_apply_refuses_before_anything_is_written(net, root):
    other = root / "etc/netplan/50-cloud-init.yaml"
    other.write_text("network:\n  ethernets:\n    enp1s0f0np0:\n      dhcp4: true\n")
    before = files(root)
    said = net("apply", "--role", "head", "--yes", rc=9).stderr
    assert "50-cloud-init.yaml:3: also configures enp1s0f0np0" in said
    assert files(root) == before
    other.unlink()
    (root / OURS).symlink_to("01-network-manager-all.yaml")
    assert "symbolic link" in net("apply", "--role", "head", "--yes", "--force", rc=4).stderr
    assert (root / OURS).is_symlink()


def test_options_that_make_no_sense(net):
    for options, says in {
        "": "--role head",
        "--role worker --nodes 3": "--node 2 to --node 3",
        "--role worker --node 1": "only the head",
        "--role head --network 192.168.100.1/24": "has host bits set",
    }.items():
        assert says in net("plan", *options.split(), rc=2).stderr


def test_the_head_and_then_the_worker_by_what_each_plan_prints(cli, tmp_path):
    """Every `next:` is pasted. The head has numbers of its owner's, the worker has none yet."""
    head, worker = (networks.build(tmp_path, name) for name in ("thirteen", "fresh_port1"))

    def pasted(said, where):
        line = next(each for each in said.splitlines() if each.startswith(f"next{where}: "))
        words = shlex.split(line)
        return words[words.index("net") :]

    said = cli("net", "plan", "--root", head, "--role", "head").stdout
    assert said.startswith("this network is fine already: nothing to do\n")
    assert cli("net", "apply", "--root", head).stdout.startswith("this network is fine already")
    verified = cli(*pasted(said, "")).stdout
    assert "fine" in verified.splitlines()[-1]
    there = pasted(said, ", on the other node, if it has no address yet")
    said = cli(*there, "--root", worker).stdout
    assert "add  enp1s0f1np1    192.168.11.11/24  MTU 9000  cage 1, twin A, to node 1" in said
    cli(*pasted(said, ""), "--yes")
    assert "192.168.12.11/24" in (worker / OURS).read_text()


# Killed


def test_an_interrupted_apply_is_told(net, root):
    place, host = NetHistory(root), probe(root, environment={})
    asked = {"node": 1, "network": IPv4Network("192.168.100.0/24")}
    first, second = (make_net_plan(host, NetPlanOptions(**asked, mtu=mtu)) for mtu in (9000, 1500))
    net_history.apply_plan(place, first, force=False)
    changes, _step = net_history.changes_to_write(place, render_netplan(second).encode(), second)
    note = {"verb": "apply", "addresses": {}, "former": {}}
    died = in_child(lambda: place.journal.commit(changes, settle=kill, note=note))
    assert died == -signal.SIGKILL
    assert "was cut short" in net("plan", "--role", "head").stderr
    checked = net("verify", rc=9).stdout
    assert "was cut short" in checked
    said = net("apply", "--role", "worker", "--yes")
    assert "put back first" in said.stdout
    assert (root / OURS).read_text() != render_netplan(second)
    assert len(place.step_folders()) == 2


# Live


NETPLAN = """\
#!/bin/sh
echo "$@" >> "$LOG"
[ "$1" = generate ] && exit 0
case "$(cat /etc/netplan/40-patchkit.yaml 2>/dev/null)" in
*192.168.100.10*)
  ip address add 192.168.100.10/24 dev enp1s0f0np0
  ip address add 192.168.101.10/24 dev enP2p1s0f0np0
  {then};;
*) {back};;
esac
"""


@pytest.fixture
def live(environment, tmp_path):
    """A machine of its own, as far as the network, /etc/netplan and /var/lib go."""
    folders = {name: tmp_path / name for name in ("netplan", "lib", "bin")}
    for folder in folders.values():
        folder.mkdir()
    setup = [
        f"mount --bind {folders['lib']} /var/lib",
        f"mkdir -p /etc/netplan && mount --bind {folders['netplan']} /etc/netplan",
        "mount -t sysfs sysfs /sys",  # with the interfaces of this network namespace
        "ip link set lo up",
        "ip link add lan0 type veth peer name lan1",
        "ip address add 10.0.0.11/24 dev lan0",
        "ip link add enp1s0f0np0 type veth peer name first",
        "ip link add enP2p1s0f0np0 type veth peer name second",
        *(f"ip link set {each} up" for each in LINKS),
        "ip route add default via 10.0.0.1 dev lan0",
    ]
    within = ["unshare", "--net", "--mount", "sh", "-ec"]
    tried = subprocess.run([*within, "\n".join(setup)], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no namespaces of one's own: {tried.stderr.strip()}")

    def run(script, *, then=":", back=":"):
        program = NETPLAN.format(then=then, back=back)
        write_files(folders["bin"], {"netplan": program}, mode=0o755)
        log = tmp_path / "log"
        log.write_text("")
        path = f"{folders['bin']}:{os.environ['PATH']}"
        function = f'patchkit() {{ {sys.executable} -m patchkit "$@"; }}'
        commands = "\n".join([*setup, function, script])
        env = {**environment, "PATH": path, "LOG": str(log)}
        done = subprocess.run([*within, commands], capture_output=True, text=True, env=env)
        assert "Traceback" not in done.stderr, done.stderr
        done.log = log.read_text().splitlines()
        done.file = folders["netplan"] / OURS.name
        return done

    return run


APPLY = "patchkit net apply --role head --netdev enp1s0f0np0 --netdev enP2p1s0f0np0 --yes"
HASTY = APPLY.replace("patchkit", f"{sys.executable} {Path(hosts.__file__).parent}/hasty.py", 1)


def test_live_apply_and_undo(live):
    """Addresses that patchkit gave go with undo, also where the renderer would leave them."""
    plan = "patchkit net plan --netdev enp1s0f0np0 --netdev enP2p1s0f0np0"
    shown = f"ip -br address; {plan}; {plan} --mtu 9000; echo ----"
    done = live(f"{APPLY} --mtu 1500; {shown}; patchkit net undo; ip -br address")
    assert done.returncode == 0, done.stderr
    assert "is written and applied" in done.stdout
    applied, undone = done.stdout.split("----")
    assert "this network is fine already: nothing to do\n" in applied
    assert "mtu  enp1s0f0np0    192.168.100.10/24  MTU 9000 (was 1500)  by name" in applied
    assert "192.168.100.10/24" in applied
    assert "192.168.101.10/24" in applied
    assert "192.168.10" not in undone
    assert "is gone, as before" in undone
    assert "10.0.0.11/24" in undone
    assert not done.file.exists()
    assert done.log == ["generate", "apply"] * 2


def test_the_way_in_is_lost(live):
    """The stand-in takes away the address of the default route and that of an SSH session.

    It gives them back when the file is gone. As with sudo, only a parent process knows of SSH.
    """
    addresses = ("10.0.0.11/24 dev lan0", "10.9.9.9/24 dev lan1")
    done = live(
        f"ip address add {addresses[1]}\n"
        "env SSH_CONNECTION='10.9.9.1 5 10.9.9.9 22' "
        f"sh -c 'env -u SSH_CONNECTION {HASTY}; echo code $?'\n"
        f"ip -br address; ls -A /etc/netplan /var/lib/patchkit",
        then="; ".join(f"ip address del {each}" for each in addresses),
        back="; ".join(f"ip address add {each}" for each in addresses),
    )
    assert "no longer had 10.0.0.11/24, 10.9.9.9/24; the former network is back" in done.stderr
    after = done.stdout.partition("code 9")[2]
    assert "10.0.0.11/24" in after
    assert "10.9.9.9/24" in after
    assert "192.168.10" not in after
    assert after.endswith("/etc/netplan:\n\n/var/lib/patchkit:\n")
    assert done.log == ["generate", "apply"] * 2


def test_without_rights():
    """The command to run is named in full, since sudo has its own PATH."""
    own = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    own |= {"env": {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}}
    own |= {"capture_output": True, "text": True}
    python = ["env", sys.executable, "-c"]  # env, since this Python may be hidden from nobody
    if subprocess.run([*python, "import patchkit"], **own).returncode:
        pytest.skip("nobody may not read this checkout")
    code = "import sys; sys.argv[0] = 'patchkit'; from patchkit.cli import main; main()"
    done = subprocess.run([*python, code, "net", "undo"], **own)
    assert done.returncode == 9, done.stderr
    assert "need root" in done.stderr
    assert "/patchkit net undo" in done.stderr
