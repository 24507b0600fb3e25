"""`patchkit net verify` on two real nodes: network namespaces, a LAN and two cables between them.

The kernel has no RDMA, so what is about RDMA must say that it was not checked. What needs the
distribution's `ip` or iputils' `ping` is skipped without them; what patchkit says then is tested.
"""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from support import run_program, write_files

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
        subprocess.run(["ip", "-n", self.names[node], *arguments], check=True)

    def up(self):
        for node, name in enumerate(self.names):
            subprocess.run(["ip", "netns", "add", name], check=True)
            self.ip(node, "link", "set", "lo", "up")
        pairs = [("lan0", "lan0"), *zip(QSFP, OTHER, strict=True)]
        networks = ("10.0.0", "192.168.100", "192.168.101")
        for (first, second), network in zip(pairs, networks, strict=True):
            ends = ["type", "veth", "peer", "name", second, "netns", self.names[1]]
            self.ip(0, "link", "add", first, *ends)
            for node, netdev in enumerate((first, second)):
                mtu = "1500" if netdev == "lan0" else "9000"
                self.ip(
                    node, "address", "add", f"{network}.1{node + 1}/24", "dev", netdev
                )
                self.ip(node, "link", "set", netdev, "mtu", mtu, "up")
        for node in (0, 1):
            self.ip(node, "route", "add", "default", "via", "10.0.0.1", "dev", "lan0")

    def down(self):
        for name in self.names:
            subprocess.run(
                ["ip", "netns", "del", name], capture_output=True, check=False
            )

    def sockets(self, node, *states):
        """Lines of ss."""
        words = ["ip", "netns", "exec", self.names[node], "ss", "-Hn", *states]
        return subprocess.run(words, capture_output=True, check=True).stdout

    def patchkit(self, node, *arguments, rc, path=None):
        """Run it there; its standard output."""
        environment = {**self.environment, **({"PATH": str(path)} if path else {})}
        inside = [shutil.which("ip"), "netns", "exec", self.names[node]]
        command = [*inside, sys.executable, "-m", "patchkit", *map(str, arguments)]
        done = run_program(*command, rc=rc, env=environment)
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    def verify(self, *arguments, rc, node=0, path=None):
        """``where: check`` → (level, what was seen)."""
        text = self.patchkit(
            node, "net", "verify", "--json", *arguments, rc=rc, path=path
        )
        return {
            f"{check['where']}: {check['about']}": (check["level"], check["what"])
            for check in json.loads(text)["checks"]
        }


@pytest.fixture
def namespaces(environment):
    """Two nodes and their cables; whether a ping is there does not matter."""
    if not shutil.which("ip"):
        pytest.skip("ip is not installed (iproute2): no network namespaces")
    made = Nodes(environment)
    tried = subprocess.run(
        ["ip", "netns", "add", made.names[0]], capture_output=True, text=True
    )
    if tried.returncode:
        pytest.skip(
            f"network namespaces are not permitted here: {tried.stderr.strip()}"
        )
    made.down()
    try:
        made.up()
        yield made
    finally:
        made.down()


@pytest.fixture
def nodes(namespaces):
    """The same, on a machine with the ping that patchkit uses."""
    said = (
        subprocess.run(["ping", "-V"], capture_output=True, text=True) if PING else None
    )
    if not said or "iputils" not in said.stdout:
        pytest.skip("iputils' ping is not installed (iputils-ping)")
    return namespaces


def states(checks):
    return {name: state for name, (state, _seen) in checks.items() if state != "ok"}


EXPECTED = {  # veth says 10000 Mbit/s, and the kernel has no RDMA
    f"{netdev}: {what}": "warning" if what == "speed" else "unknown"
    for netdev in QSFP
    for what in ("speed", "RoCE v2 GID")
}
ALL_WELL = {
    f"{peer}: {what}"
    for peer in ("192.168.100.12", "192.168.101.12")
    for what in ("same network", "route", "echo", "9000-byte frames")
}


def test_all_is_well(nodes):
    checks = nodes.verify(*NAMED, *PEERS, rc=0)
    assert states(checks) == EXPECTED
    assert set(checks) >= ALL_WELL
    shown = nodes.patchkit(0, "net", "verify", *NAMED, *PEERS, rc=0)
    assert "2 warnings, 2 not checked, 15 fine" in shown.splitlines()[-1]


# What is wrong, as `ip` makes it: which node, and its words; and what differs.
FAULTS = {
    "small MTU there": (
        [(1, f"link set {OTHER[0]} mtu 1500")],
        {"192.168.100.12: 9000-byte frames": "error"},
    ),
    "peer down": (
        [(1, f"address flush dev {OTHER[1]}")],
        {
            "192.168.101.12: echo": "error",
            "192.168.101.12: 9000-byte frames": "unknown",
        },
    ),
    # An echo would be answered, and would prove nothing.
    "way over the LAN": (
        [(0, "route add 192.168.100.12/32 via 10.0.0.12 dev lan0")],
        {
            "192.168.100.12: route": "error",
            "192.168.100.12: echo": "unknown",
            "192.168.100.12: 1500-byte frames": "unknown",
        },
    ),
}


@pytest.mark.parametrize(
    "fault",
    [
        "small MTU there",
        *(pytest.param(name, marks=pytest.mark.e2e) for name in [*FAULTS][1:]),
    ],
)
def test_faults_are_found(nodes, fault):
    changes, differs = FAULTS[fault]
    for node, words in changes:
        nodes.ip(node, *words.split())
    checks = nodes.verify(*NAMED, *PEERS, rc=9)
    assert states(checks) == {**EXPECTED, **differs}


def test_both_ends_by_the_peers_facts(nodes, tmp_path):
    """The `ssh` starts the command in the other namespace."""
    script = (
        "#!/bin/sh\n"
        'for last; do before="$destination"; destination="$last"; done\n'
        '[ "$before" = me@peer ] || exit 255\n'
        f'exec ip netns exec {nodes.names[1]} sh -c "$last"\n'
    )
    path = f"{write_files(tmp_path, {'ssh': script}, mode=0o755)}:{os.environ['PATH']}"
    remote = ["--ssh", "me@peer"]
    checks = nodes.verify(*NAMED, *remote, rc=0, path=path)
    assert set(checks) >= ALL_WELL | {
        "both ends: addresses",
        f"{QSFP[0]}: mtu",
    }
    nodes.ip(1, "link", "set", OTHER[1], "mtu", "1500")
    checks = nodes.verify(*NAMED, *remote, rc=9, path=path)
    mtu = f"{OTHER[1]} has an MTU of 1500, and localhost one of 9000"
    assert checks["me@peer: mtu"] == ("error", mtu)


SSH = """\
#!/bin/sh
for last; do before="$destination"; destination="$last"; done
exec ip netns exec "$before" sh -c "$last"
"""


def test_the_cable_is_measured_and_nothing_listens_after_a_kill(namespaces, tmp_path):
    """By sockets: no kernel here has RDMA. Killed after some seconds, then to the end."""
    path = f"{write_files(tmp_path, {'ssh': SSH}, mode=0o755)}:{os.environ['PATH']}"
    rows = "".join(f'[[node]]\nssh = "{name}"\n' for name in namespaces.names)
    file = write_files(tmp_path / "x", {"cluster.toml": rows}) / "cluster.toml"
    words = ["net", "verify", "--measure", "--file", str(file), *NAMED]

    inside = ["ip", "netns", "exec", namespaces.names[0], sys.executable, "-m"]
    environment = {**namespaces.environment, "PATH": path}
    with subprocess.Popen(
        [*inside, "patchkit", *words], env=environment, stderr=subprocess.PIPE
    ) as running:
        assert QSFP[0].encode() in running.stderr.readline()
        for _ in range(200):
            time.sleep(0.1)
            if namespaces.sockets(1, "-t") and not namespaces.sockets(1, "-lt"):
                break  # one connection is taken, and no other one would be
        else:
            raise AssertionError("nothing is sent")
        running.kill()
    for _ in range(100):
        time.sleep(0.1)
        if not namespaces.sockets(1, "-t") and not namespaces.sockets(1, "-lt"):
            break
    else:
        raise AssertionError("something is left")

    text = namespaces.patchkit(0, *words, "--json", rc=0, path=path)
    answer = json.loads(text)
    ends = " to ".join(namespaces.names)
    places = [f"{ends}, {part}" for part in (*QSFP, "both halves")]
    rows = answer["measured"]
    assert [row["where"] for row in rows] == places
    assert all(0.1 < row["gbits"] < 1000 for row in rows)
    abouts = {row["about"] for row in answer["checks"]}
    assert abouts <= {"bandwidth-tcp", "bandwidth-tcp-low"}
    assert all("Gb/s by sockets: " in row["what"] for row in answer["checks"])


UNTRIED = {
    f"{peer}: {what}": "unknown"
    for peer in ("192.168.100.12", "192.168.101.12")
    for what in ("echo", "9000-byte frames")
}
FORBIDDEN = """\
#!/bin/sh
[ "$1" = -V ] && echo 'ping from iputils 20240117' && exit
echo 'ping: socktype: SOCK_RAW' >&2; exit 2"""


def test_without_the_right_ping_the_way_is_not_checked(namespaces, tmp_path):
    """Not that it failed, and not that it is well: the far end of one cable has a small MTU."""
    namespaces.ip(1, "link", "set", OTHER[0], "mtu", "1500")
    bare = write_files(tmp_path / "bin", {"ping": FORBIDDEN}, mode=0o755)
    (bare / "ip").symlink_to(shutil.which("ip"))
    checks = namespaces.verify(*NAMED, *PEERS, rc=0, path=bare)
    assert states(checks) == {**EXPECTED, **UNTRIED}
    state, said = checks["192.168.100.12: 9000-byte frames"]
    assert (state, said.startswith("ping: socktype: SOCK_RAW")) == ("unknown", True)
    shown = namespaces.patchkit(0, "net", "verify", *NAMED, *PEERS, rc=0, path=bare)
    assert "\n  next:  sudo ping -M do" in shown


def test_without_ip_the_route_is_not_checked(cli, tmp_path):
    to_itself = ["--netdev", "lo", "--peer", "127.0.0.2"]
    done = cli("net", "verify", *to_itself, env={"PATH": str(tmp_path)}, rc=9)
    assert "ip: is not installed\n  next:  sudo apt install iproute2\n" in done.stdout


def test_refused(cli):
    for option, value in (("--ssh", "-oProxyCommand=x"), ("--peer", "spark-2")):
        said = cli("net", "verify", "--netdev", "lo", option, value, rc=2).stderr
        assert f"'{value}' is not" in said
