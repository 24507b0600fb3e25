"""Faults that are really made on nodes with systemd, for `patchkit doctor` to find and to cure."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from e2e.emulation import wires
from e2e.lifecycle.cluster import MODEL, Begin, EmulatedCluster, insist
from e2e.lifecycle.nodes import HOME
from e2e.lifecycle.rootfs import UID, USER

HEAD, WORKER = "spark1", "spark2"
UNIT = "patchkit-vllm.service"
ENV = f"{HOME}/.config/patchkit/vllm/node.env"
PORT = 29501
FIRST, SECOND = wires.halves(2)
# A device as sysfs shows one: /sys/class is covered by a copy of its links with one folder more.
RDMA = f"""\
set -eu
mkdir -p /run/class
mount --rbind /sys/class /run/class && mount --make-rprivate /run/class
mount -t tmpfs tmpfs /sys/class
for each in /run/class/*; do
  mkdir "/sys/class/${{each##*/}}" && mount --rbind "$each" "/sys/class/${{each##*/}}"
done
port=/sys/class/infiniband/rocep1s0f1/ports/1
mkdir -p "$port" "$port/../../device/net/{FIRST}"
echo '4: ACTIVE' > "$port/state"
echo Ethernet > "$port/link_layer"
mkdir -p /dev/infiniband && touch /dev/infiniband/uverbs0 && chmod 666 /dev/infiniband/uverbs0
"""


@dataclass(frozen=True)
class Fault:
    """A fault, named as the check that has to find it; ``node`` is the one that has to be named.

    ``root`` and ``user`` are scripts that make it there, or ``make`` does. ``begin`` is how the
    cluster is when it is made; ``also`` are checks that may say more, since it is true as well.
    ``cured`` gets the command, and does what takes a person, systemd or a boot; ``by`` are its
    words in the table.
    """

    name: str
    what: str
    _: KW_ONLY
    root: str = ""
    user: str = ""
    make: Callable[[EmulatedCluster], object] | None = None
    about: str = ""
    node: str = WORKER
    begin: Begin = "stopped"
    also: tuple[str, ...] = ()
    cured: Callable[[EmulatedCluster, str], object] | None = None
    by: str = ""

    def strike(self, cluster: EmulatedCluster) -> None:
        """Make it."""
        node = cluster.rack[self.node]
        for run, script in ((node.root, self.root), (node.user, self.user)):
            done = run("sh", "-c", script)
            insist(not done.trouble, f"{script}: {done.trouble}")
        if self.make:
            self.make(cluster)


def _wire(cluster: EmulatedCluster, *, cut: bool) -> None:
    wires = cluster.rack.wires
    (wires.cut if cut else wires.join)("qsfp", WORKER)
    time.sleep(2)  # networkd takes the addresses away, or gives them


def _stop(cluster: EmulatedCluster) -> None:
    (pid,) = cluster.processes(WORKER)["worker"]
    cluster.worker.user("kill", "-STOP", pid)


def _kill(cluster: EmulatedCluster) -> None:
    before = cluster.ranks()
    cluster.kill(WORKER, "worker")
    cluster.heals(before)


def _start_again(cluster: EmulatedCluster, _command: str) -> None:
    cluster.patchkit("down")
    cluster.up()


def _empty(cluster: EmulatedCluster, command: str) -> None:
    shown = paste(cluster, command)
    insist("filler" in shown, f"`{command}` does not show what is large: {shown}")
    cluster.worker.unfill()


def _raise_limit(cluster: EmulatedCluster, command: str) -> None:
    """Run the command and boot; the limit itself cannot be raised where these nodes are made."""
    paste(cluster, command)
    cluster.worker.shut_down()
    cluster.worker.boot()
    own = ("systemctl", "show", f"user@{UID}.service", "--property=LimitMEMLOCK", "--value")
    limit = cluster.worker.root(*own).output.strip()
    insist(limit == "infinity", f"user@{UID}.service has a limit of {limit}")


def paste(cluster: EmulatedCluster, command: str) -> str:
    """Run a printed command on the laptop as it stands; return what it prints."""
    script = f'patchkit() {{ "{sys.executable}" -m patchkit "$@"; }}\n{command}'
    done = cluster.rack.laptop.run("sh", "-c", script, seconds=300)
    insist(not done.trouble, f"{command}: {done.trouble}")
    return done.output


def _take_port(cluster: EmulatedCluster) -> None:
    own = ("python3", "-m", "http.server", "--bind", wires.qsfp_ip(1), str(PORT))
    cluster.head.user("systemd-run", "--user", "--unit=other", *own)
    cluster.head.wait_for_port(PORT)


FAULTS = (
    Fault(
        "ssh",
        "sshd of the worker ended",
        make=lambda cluster: cluster.worker.refuse_ssh(),
        cured=lambda cluster, command: cluster.worker.root(*command.split()[1:]),
        by="the printed command, at its own console",
    ),
    Fault(
        "cable",
        "the cable out",
        make=lambda cluster: _wire(cluster, cut=True),
        cured=lambda cluster, _command: _wire(cluster, cut=False),
        by="a hand",
    ),
    Fault(
        "mtu",
        "MTU 1500 at one end, while it serves",
        root=f"ip link set {FIRST} mtu 1500",
        begin="serving",
    ),
    Fault(
        "address",
        "the worker lost its address",
        root=f"ip address del {wires.qsfp_ip(2)}/24 dev {FIRST}",
    ),
    Fault(
        "address-twice",
        "the head's address on the worker, too",
        root=f"ip address add {wires.qsfp_ip(1)}/32 dev {FIRST}",
    ),
    Fault(
        "networks",
        "both halves of the cable in one network",
        root=f"ip address add 192.168.177.12/24 dev {SECOND}",
    ),
    Fault("linger", "lingering off", root=f"rm /var/lib/systemd/linger/{USER}"),
    Fault("journal", "no journal that outlives a boot", root="rm -rf /var/log/journal"),
    Fault(
        "disk",
        "no byte free on the worker's disk",
        make=lambda cluster: cluster.worker.fill(),
        cured=_empty,
        by="a hand, with what the printed command shows",
    ),
    Fault(
        "memlock",
        "RDMA devices, and a limit of 8 MiB of locked memory",
        root=RDMA,
        cured=_raise_limit,
        by="the printed command and a boot: the unit's limit is infinity, which is all that "
        "can be tried where nobody may raise one",
    ),
    Fault(
        "model",
        "a model's file cut short on one node",
        user=f"truncate -s -2 {HOME}{MODEL[1:]}/model.safetensors",
    ),
    Fault(
        "model-same",
        "another configuration of the model on one node",
        user=f"echo ' ' >> {HOME}{MODEL[1:]}/config.json",
    ),
    Fault("edited", "another line in node.env of one node", user=f"echo '# mine' >> {ENV}"),
    Fault(
        "unit-file",
        "a unit that systemd has not read since it was changed",
        user=f"sleep 1; touch .config/systemd/user/{UNIT}",
        begin="serving",
    ),
    Fault("port", "another server at the rendezvous' port", make=_take_port, node=HEAD),
    Fault(
        "left-over",
        "a process of the group left after `down`",
        user="systemd-run --user --setenv=PATCHKIT_CLUSTER=vllm sleep 1000",
    ),
    Fault(
        "rank-stopped",
        "a rank's worker process stopped (`kill -STOP`)",
        make=_stop,
        begin="serving",
        also=("server-token-none",),  # which follows from it
    ),
    Fault(
        "rank-killed",
        "a rank's worker process killed; systemd has started all again",
        make=_kill,
        about="restarts",
        node=HEAD,
        begin="serving",
        cured=_start_again,
        by="systemd at once; the warning stays until the next `up`",
    ),
)
