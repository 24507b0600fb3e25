"""`patchkit net verify` on two real nodes: network namespaces, a LAN and two cables between them.

The kernel has no RDMA, so what is about RDMA must say that it was not checked. What needs the
distribution's `ip` or iputils' `ping` is skipped without them; what patchkit says then is tested.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

QSFP = ("enp1s0f0np0", "enP2p1s0f0np0")  # on the first node
OTHER = ("enp1s0f1np1", "enP2p1s0f1np1")  # on the second, which uses its other cage
NAMED = [part for name in QSFP for part in ("--netdev", name)]
PING = shutil.which("ping")
PEERS = ["--peer", "192.168.100.12", "--peer", "192.168.101.12"]


class Nodes:
    """Two namespaces. ``ip(0, ...)`` configures the first one."""

    def __init__(self, environment):
        self.names = [f"patchkit-{os.getpid()}-{number}" for number in (1, 2)]
        self.environment = environment

    def ip(self, node, *arguments):
        self.call("ip", "-n", self.names[node], *arguments)

    def call(self, *command):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def up(self):
        for name in self.names:
            self.call("ip", "netns", "add", name)
            self.call("ip", "-n", name, "link", "set", "lo", "up")
        pairs = [("lan0", "lan0"), *zip(QSFP, OTHER, strict=True)]
        networks = ("10.0.0", "192.168.100", "192.168.101")
        for (first, second), network in zip(pairs, networks, strict=True):
            ends = ["netns", self.names[0], "type", "veth", "peer", "name", second]
            self.call("ip", "link", "add", first, *ends, "netns", self.names[1])
            for node, netdev in enumerate((first, second)):
                if netdev != "lan0":
                    self.ip(node, "link", "set", netdev, "mtu", "9000")
                self.ip(node, "address", "add", f"{network}.1{node + 1}/24", "dev", netdev)
                self.ip(node, "link", "set", netdev, "up")
        for node in (0, 1):
            self.ip(node, "route", "add", "default", "via", "10.0.0.1", "dev", "lan0")

    def down(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def patchkit(self, node, *arguments, rc, path=None):
        """Run it there; its standard output."""
        environment = {**self.environment, **({"PATH": str(path)} if path else {})}
        inside = [shutil.which("ip"), "netns", "exec", self.names[node]]
        command = [*inside, sys.executable, "-m", "patchkit", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == rc, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def verify(self, *arguments, rc, node=0, path=None):
        """``subject: what`` → (state, seen)."""
        text = self.patchkit(node, "net", "verify", "--json", *arguments, rc=rc, path=path)
        return {
            f"{check['subject']}: {check['what']}": (check["state"], check["seen"])
            for check in json.loads(text)["checks"]
        }


@pytest.fixture
def namespaces(environment):
    """Two nodes and their cables; whether a ping is there does not matter."""
    if not shutil.which("ip"):
        pytest.skip("ip is not installed (iproute2): no network namespaces")
    made = Nodes(environment)
    tried = subprocess.run(["ip", "netns", "add", made.names[0]], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"network namespaces are not permitted here: {tried.stderr.strip()}")
    made.down()
    try:
        made.up()
        yield made
    finally:
        made.down()


@pytest.fixture
def nodes(namespaces):
    """The same, on a machine with the ping that patchkit uses."""
    said = subprocess.run(["ping", "-V"], capture_output=True, text=True) if PING else None
    if not said or "iputils" not in said.stdout:
        pytest.skip("iputils' ping is not installed (iputils-ping)")
    return namespaces


def states(checks):
    return {name: state for name, (state, _seen) in checks.items() if state != "ok"}


EXPECTED = {  # veth says 10000 Mbit/s, and the kernel has no RDMA
    f"{netdev}: {what}": state
    for netdev in QSFP
    for what, state in {
        "speed": "warning",
        "RoCE v2 GID": "not checked",
        "PCIe lanes": "not checked",
    }.items()
}
ALL_WELL = {
    f"{peer}: {what}"
    for peer in ("192.168.100.12", "192.168.101.12")
    for what in ("same network", "route", "echo", "9000-byte frames", "neighbour")
}


def test_all_is_well(nodes):
    checks = nodes.verify(*NAMED, *PEERS, rc=0)
    assert states(checks) == EXPECTED
    assert set(checks) >= ALL_WELL
    shown = nodes.patchkit(0, "net", "verify", *NAMED, *PEERS, rc=0)
    assert "18 ok, 0 failed, 2 warning, 4 not checked" in shown


def test_a_small_mtu_at_the_other_end(nodes):
    """A small echo is answered, as on real cables; the jumbo frame is not."""
    nodes.ip(1, "link", "set", OTHER[0], "mtu", "1500")
    checks = nodes.verify(*NAMED, *PEERS, rc=9)
    assert states(checks) == {**EXPECTED, "192.168.100.12: 9000-byte frames": "failed"}
    assert checks["192.168.100.12: echo"][0] == "ok"


def test_a_small_mtu_here(nodes):
    nodes.ip(0, "link", "set", QSFP[0], "mtu", "1500")
    checks = nodes.verify(*NAMED, *PEERS, rc=0)
    assert states(checks) == {**EXPECTED, f"{QSFP[0]}: MTU": "warning"}
    assert checks["192.168.100.12: 1500-byte frames"][0] == "ok"
    checks = nodes.verify(*NAMED, *PEERS, "--mtu", "9000", rc=9)
    assert states(checks) == {
        **EXPECTED,
        f"{QSFP[0]}: MTU": "failed",
        "192.168.100.12: 9000-byte frames": "failed",
    }
    nodes.ip(0, "link", "set", QSFP[1], "mtu", "1500")
    assert states(nodes.verify(*NAMED, *PEERS, "--mtu", "1500", rc=0)) == EXPECTED


def test_the_peer_is_down(nodes):
    nodes.ip(1, "address", "flush", "dev", OTHER[1])
    failed = {f"192.168.101.12: {what}" for what in ("echo", "9000-byte frames", "neighbour")}
    checks = nodes.verify(*NAMED, *PEERS, rc=9)
    assert states(checks) == {**EXPECTED, **dict.fromkeys(failed, "failed")}


def test_the_cable_is_out(nodes):
    nodes.ip(1, "link", "set", OTHER[0], "down")
    checks = nodes.verify(*NAMED, *PEERS, rc=9)
    assert checks[f"{QSFP[0]}: link"][0] == "failed"
    assert checks["192.168.101.12: 9000-byte frames"][0] == "ok"


def test_a_peer_in_another_network(nodes):
    nodes.ip(1, "address", "add", "192.168.105.12/24", "dev", OTHER[0])
    checks = nodes.verify(*NAMED, "--peer", "192.168.105.12", rc=9)
    assert checks["192.168.105.12: same network"][0] == "failed"
    route = "through lan0, by way of 10.0.0.1, not a QSFP interface"
    assert checks["192.168.105.12: route"] == ("failed", route)
    assert checks["192.168.105.12: echo"][0] == "not checked"


def test_the_way_leads_over_the_lan(nodes):
    """An echo would be answered, and would prove nothing."""
    nodes.ip(0, "route", "add", "192.168.100.12/32", "via", "10.0.0.12", "dev", "lan0")
    checks = nodes.verify(*NAMED, *PEERS, rc=9)
    untried = {f"192.168.100.12: {what}" for what in ("echo", "jumbo frames", "neighbour")}
    assert states(checks) == {
        **EXPECTED,
        "192.168.100.12: route": "failed",
        **dict.fromkeys(untried, "not checked"),
    }
    assert checks["192.168.100.12: route"][1].startswith("through lan0, by way of 10.0.0.12")


def test_cables_that_lead_elsewhere_are_found_out(nodes):
    """The addresses of the first cable are at the second one's end."""
    for netdev, network in zip(OTHER, ("192.168.101", "192.168.100"), strict=True):
        nodes.ip(1, "address", "flush", "dev", netdev)
        nodes.ip(1, "address", "add", f"{network}.12/24", "dev", netdev)
    checks = nodes.verify(*NAMED, "--peer", "192.168.100.12", rc=9)
    found = f"answers at {QSFP[1]}, not at {QSFP[0]}"
    assert checks["192.168.100.12: cabling"] == ("failed", found)


def test_both_ends_by_the_peers_facts(nodes, tmp_path):
    """From a file, and by an `ssh` that starts the command in the other namespace."""
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(
        "#!/bin/sh\n"
        '[ "$1 $2 $3 $4 $5 $6" = "-o BatchMode=yes -o ConnectTimeout=10 -- me@peer" ] || exit 255\n'
        f'exec ip netns exec {nodes.names[1]} sh -c "$7"\n'
    )
    ssh.chmod(0o755)
    there = f"{sys.executable} -m patchkit"
    path = f"{ssh.parent}:{os.environ['PATH']}"
    remote = ["--ssh", "me@peer", "--ssh-patchkit", there]
    checks = nodes.verify(*NAMED, *remote, rc=0, path=path)
    assert set(checks) >= ALL_WELL | {
        "both ends: addresses",
        f"{QSFP[0]} 192.168.100.0/24: equal MTU",
    }
    file = tmp_path / "peer.json"
    file.write_text(nodes.patchkit(1, "probe", "--json", rc=0))
    assert nodes.verify(*NAMED, "--peer-probe", file, rc=0).keys() == checks.keys()
    nodes.ip(1, "link", "set", OTHER[1], "mtu", "1500")
    checks = nodes.verify(*NAMED, *remote, rc=9, path=path)
    assert checks[f"{QSFP[1]} 192.168.101.0/24: equal MTU"][0] == "failed"


UNTRIED = {
    f"{peer}: {what}": "not checked"
    for peer in ("192.168.100.12", "192.168.101.12")
    for what in ("echo", "9000-byte frames", "neighbour")
}
# What the others print and return when they are asked for their version.
BUSYBOX = """echo "ping: invalid option -- 'V'" >&2; exit 1"""
INETUTILS = """echo 'ping (GNU inetutils) 2.4'"""
FORBIDDEN = """\
[ "$1" = -V ] && echo 'ping from iputils 20240117' && exit
echo 'ping: socktype: SOCK_RAW' >&2; exit 2"""


@pytest.fixture
def path(tmp_path):
    """A PATH with nothing but ip, and the ping that it is given: ``path(BUSYBOX)``."""

    def make(ping=""):
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "ip").symlink_to(shutil.which("ip"))
        if ping:
            (folder / "ping").write_text(f"#!/bin/sh\n{ping}\n")
            (folder / "ping").chmod(0o755)
        return folder

    return make


@pytest.mark.parametrize(
    ("ping", "seen"),
    [
        ("", "ping is not installed"),
        (BUSYBOX, "the ping installed here is not that of iputils"),
        (INETUTILS, "the ping installed here is not that of iputils"),
    ],
    ids=["none", "busybox", "inetutils"],
)
def test_without_the_right_ping_the_way_is_not_checked(namespaces, path, ping, seen):
    """Not that it failed, and not that it is well: the far end of one cable has a small MTU."""
    namespaces.ip(1, "link", "set", OTHER[0], "mtu", "1500")
    known = ["192.168.101.12", "lladdr", "02:00:00:00:00:01"]
    namespaces.ip(0, "neighbour", "add", *known, "dev", QSFP[1])
    bare = path(ping)
    checks = namespaces.verify(*NAMED, *PEERS, rc=0, path=bare)
    del (expected := {**EXPECTED, **UNTRIED})["192.168.101.12: neighbour"]
    assert states(checks) == expected
    assert checks["192.168.100.12: 9000-byte frames"] == ("not checked", seen)
    shown = namespaces.patchkit(0, "net", "verify", *NAMED, *PEERS, rc=0, path=bare)
    assert f"not checked: {seen}\n   next: sudo apt install iputils-ping\n" in shown


def test_a_ping_without_its_rights_is_no_failure_of_the_network(namespaces, path):
    bare = path(FORBIDDEN)
    checks = namespaces.verify(*NAMED, *PEERS, rc=0, path=bare)
    assert states(checks) == {**EXPECTED, **UNTRIED}
    shown = namespaces.patchkit(0, "net", "verify", *NAMED, *PEERS, rc=0, path=bare)
    assert "not checked: ping: socktype: SOCK_RAW\n   next: sudo ping -4 -n" in shown


def test_without_ip_the_route_is_not_checked(cli, tmp_path):
    to_itself = ["--netdev", "lo", "--peer", "127.0.0.2"]
    done = cli("net", "verify", *to_itself, env={"PATH": str(tmp_path)})
    assert "not checked: ip is not installed\n   next: sudo apt install iproute2\n" in done.stdout
    assert done.stdout.count("not checked: the route is not known") == 3


@pytest.mark.parametrize(
    ("ssh", "says"),
    [("exit 255", "ssh must work without a password"), ("exit 127", "--ssh-patchkit")],
)
def test_a_peer_that_cannot_be_asked(cli, tmp_path, ssh, says):
    program = tmp_path / "ssh"
    program.write_text(f"#!/bin/sh\n{ssh}\n")
    program.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = cli("net", "verify", "--netdev", "lo", "--ssh", "peer", rc=9, env=env)
    assert says in done.stderr


@pytest.mark.parametrize(
    ("options", "rc", "says"),
    [
        (["--peer-probe", "peer.json"], 3, "is not what `patchkit probe --json` prints"),
        (["--peer-probe", "none.json"], 2, "none.json: no such file"),
        (["--peer-probe", "peer.json", "--ssh", "peer"], 2, "take one"),
        (["--ssh", "-oProxyCommand=x"], 2, "is not a host"),
        (["--peer", "spark-2"], 2, "'spark-2' is not an IPv4 address"),
    ],
)
def test_refused(cli, tmp_path, options, rc, says):
    (tmp_path / "peer.json").write_text('{"hello": 1}')
    assert says in cli("net", "verify", "--netdev", "lo", *options, rc=rc).stderr
