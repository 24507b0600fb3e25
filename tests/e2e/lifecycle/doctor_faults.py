"""Faults that are really made on nodes with systemd, for `patchkit doctor` to find and to cure."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from e2e.lifecycle import wiring
from e2e.lifecycle.cluster import MODEL, EmulatedCluster, insist, wait
from e2e.lifecycle.nodes import HOME, SystemdNode
from e2e.lifecycle.rootfs import UID, USER
from patchkit.process import Completed

Begin = Literal["serves", "stopped"]
HEAD, WORKER = "spark1", "spark2"
UNIT = "patchkit-vllm.service"
ENV = f"{HOME}/.config/patchkit/vllm/node.env"
PORT = 29501
FIRST, SECOND = wiring.halves(2)
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

    ``begin`` is how the cluster is when it is made; ``also`` are checks that may say more, since
    it is true as well. ``cured`` gets the command, and does what takes a person, systemd or a boot;
    ``by`` are its words in the table.
    """

    name: str
    what: str
    make: Callable[[EmulatedCluster], None]
    _: KW_ONLY
    about: str = ""
    node: str = WORKER
    begin: Begin = "stopped"
    also: tuple[str, ...] = ()
    cured: Callable[[EmulatedCluster, str], None] | None = None
    by: str = ""


def root(words: str, node: str = WORKER) -> Callable[[EmulatedCluster], None]:
    """Return what runs a script there as root."""
    return lambda cluster: _run(cluster.rack[node].root, words)


def user(words: str, node: str = WORKER) -> Callable[[EmulatedCluster], None]:
    """Return what runs a script there as the user."""
    return lambda cluster: _run(cluster.rack[node].user, words)


def _run(run: Callable[..., Completed], words: str) -> None:
    done = run("sh", "-c", words)
    insist(not done.trouble, f"{words}: {done.trouble}")


def _cut(cluster: EmulatedCluster) -> None:
    cluster.rack.wires.cut("qsfp", WORKER)
    time.sleep(2)  # networkd takes the addresses away


def _join(cluster: EmulatedCluster, _command: str) -> None:
    cluster.rack.wires.join("qsfp", WORKER)
    time.sleep(2)


def _stop(cluster: EmulatedCluster) -> None:
    (pid,) = cluster.processes(WORKER)["worker"]
    cluster.rack[WORKER].user("kill", "-STOP", pid)


def _kill(cluster: EmulatedCluster) -> None:
    before = cluster.ranks()
    cluster.kill(WORKER, "worker")
    cluster.heals(before)


def _again(cluster: EmulatedCluster, _command: str) -> None:
    cluster.patchkit("down")
    cluster.up()


def _empty(cluster: EmulatedCluster, command: str) -> None:
    shown = paste(cluster, command)
    insist("filler" in shown, f"`{command}` does not show what is large: {shown}")
    cluster.rack[WORKER].unfill()


def _unlimited(cluster: EmulatedCluster, command: str) -> None:
    """Run the command and boot; the limit itself cannot be raised where these nodes are made."""
    paste(cluster, command)
    node = cluster.rack[WORKER]
    node.shut_down()
    node.boot()
    own = ("systemctl", "show", f"user@{UID}.service", "--property=LimitMEMLOCK", "--value")
    limit = node.root(*own).output.strip()
    insist(limit == "infinity", f"user@{UID}.service has a limit of {limit}")


def paste(cluster: EmulatedCluster, command: str) -> str:
    """Run a printed command on the laptop as it stands; return what it prints."""
    script = f'patchkit() {{ "{sys.executable}" -m patchkit "$@"; }}\n{command}'
    done = cluster.rack.laptop.run("sh", "-c", script, seconds=300)
    insist(not done.trouble, f"{command}: {done.trouble}")
    return done.output


def _port(cluster: EmulatedCluster) -> None:
    own = (
        f"systemd-run --user --unit=other python3 -m http.server --bind {wiring.qsfp_ip(1)} {PORT}"
    )
    user(own, HEAD)(cluster)
    busy = f"ss -Hltn 'sport = :{PORT}' | grep -q ."
    wait(lambda: not cluster.rack[HEAD].user("sh", "-c", busy).trouble, 20, "nobody listens")


FAULTS = (
    Fault(
        "ssh",
        "sshd of the worker ended",
        lambda cluster: cluster.rack[WORKER].refuse_ssh(),
        cured=lambda cluster, command: root(command.removeprefix("sudo "))(cluster),
        by="the printed command, at its own console",
    ),
    Fault("cable", "the cable out", _cut, cured=_join, by="a hand"),
    Fault(
        "mtu",
        "MTU 1500 at one end, while it serves",
        root(f"ip link set {FIRST} mtu 1500"),
        begin="serves",
    ),
    Fault(
        "address",
        "the worker lost its address",
        root(f"ip address del {wiring.qsfp_ip(2)}/24 dev {FIRST}"),
    ),
    Fault(
        "address-twice",
        "the head's address on the worker, too",
        root(f"ip address add {wiring.qsfp_ip(1)}/32 dev {FIRST}"),
    ),
    Fault(
        "networks",
        "both halves of the cable in one network",
        root(f"ip address add 192.168.177.12/24 dev {SECOND}"),
    ),
    Fault("linger", "lingering off", root(f"rm /var/lib/systemd/linger/{USER}")),
    Fault("journal", "no journal that outlives a boot", root("rm -rf /var/log/journal")),
    Fault(
        "disk",
        "no byte free on the worker's disk",
        lambda cluster: cluster.rack[WORKER].fill(),
        cured=_empty,
        by="a hand, with what the printed command shows",
    ),
    Fault(
        "memlock",
        "RDMA devices, and a limit of 8 MiB of locked memory",
        root(RDMA),
        cured=_unlimited,
        by="the printed command and a boot: the unit's limit is infinity, which is all that "
        "can be tried where nobody may raise one",
    ),
    Fault(
        "model",
        "a model's file cut short on one node",
        user(f"truncate -s -2 {HOME}{MODEL[1:]}/model.safetensors"),
    ),
    Fault(
        "model-same",
        "another configuration of the model on one node",
        user(f"echo ' ' >> {HOME}{MODEL[1:]}/config.json"),
    ),
    Fault(
        "env-address",
        "node.env of one node with the head's address, by hand",
        user(f"sed -i '/^VLLM_HOST_IP/s/177[.]2/177.1/' {ENV}"),
        begin="serves",
    ),
    Fault(
        "env-shared",
        "a shared variable of node.env changed by hand on one node",
        user(f"sed -i '/^OMP_NUM_THREADS/s/4/8/' {ENV}"),
    ),
    Fault("edited", "another line in node.env of one node", user(f"echo '# mine' >> {ENV}")),
    Fault(
        "flags",
        "a flag of one node's unit changed by hand",
        user(
            f"sed -i '/^ExecStart=/s/$/ --max-num-seqs 9/' .config/systemd/user/{UNIT}"
            " && systemctl --user daemon-reload"
        ),
    ),
    Fault(
        "unit-file",
        "a unit that systemd has not read since it was changed",
        user(f"sleep 1; touch .config/systemd/user/{UNIT}"),
        begin="serves",
    ),
    Fault("port", "another server at the rendezvous' port", _port, node=HEAD),
    Fault(
        "left-over",
        "a process of the group left after `down`",
        user("systemd-run --user --setenv=PATCHKIT_CLUSTER=vllm sleep 1000"),
    ),
    Fault(
        "rank-stopped",
        "a rank's worker process stopped (`kill -STOP`)",
        _stop,
        begin="serves",
        also=("server-token-none",),  # which follows from it
    ),
    Fault(
        "rank-killed",
        "a rank's worker process killed; systemd has started all again",
        _kill,
        about="restarts",
        node=HEAD,
        begin="serves",
        cured=_again,
        by="systemd at once; the warning stays until the next `up`",
    ),
)


def allow_sudo(node: SystemdNode) -> None:
    """Let the user be root without a password, as on a new Spark."""
    rule = f"{USER} ALL=(ALL) NOPASSWD: ALL"
    place = "/etc/sudoers.d/spark"
    node.root("sh", "-c", f"echo '{rule}' > {place} && chmod 440 {place}")
