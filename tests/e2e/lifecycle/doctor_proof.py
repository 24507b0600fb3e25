"""Make faults on real systemds, let `patchkit doctor` find them, and run the cures that it prints.

    python -m e2e.lifecycle.doctor_proof WORK [--write] [FAULT ...]

A fault is proved if doctor names its check and its node, claims nothing else that it did not claim
before, and says as before once the command that it printed was run. ``--write`` puts the table of
all into docs/doctor.md.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

from e2e.emulation import wires
from e2e.emulation.lab import UnexpectedError
from e2e.lifecycle.__main__ import PageTable, run_all
from e2e.lifecycle.cluster import (
    MASTER_PORT,
    MODEL,
    UNIT,
    Begin,
    EmulatedCluster,
    Engine,
    LifecycleLab,
    insist,
)
from e2e.lifecycle.nodes import HOME
from e2e.lifecycle.rootfs import USER

# As on a new Spark: the user is root without a password.
SUDO = f"umask 337; echo '{USER} ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/spark"
PAGE = PageTable(
    page="doctor.md",
    name="faults",
    maker="nox -s doctor-proof -- --write",
    header=(
        "fault",
        "what was made",
        "found as",
        "the cure that it printed",
        "cured",
        "s",
    ),
)
HEAD, WORKER = "spark1", "spark2"
ENV = f"{HOME}/.config/patchkit/vllm/node.env"
FIRST, SECOND = wires.halves(2)
Claims = dict[tuple[str, str], dict[str, Any]]
"""Claims of doctor: what is wrong, by check and node."""


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
    make: Callable[[EmulatedCluster], object] = lambda _cluster: None
    about: str = ""
    node: str = WORKER
    begin: Begin = "stopped"
    engine: Engine = "venv"
    also: tuple[str, ...] = ()
    cured: Callable[[EmulatedCluster, str], object] | None = None
    by: str = ""


def prove(lab: LifecycleLab, fault: Fault) -> tuple[str, ...]:
    """Make a fault, and insist that it is found and cured; return its row."""
    with lab.cluster(f"doctor-{fault.name}", "serving", engine=fault.engine) as cluster:
        for node in cluster.nodes.values():
            node.root("sh", "-c", SUDO)
        if fault.begin != "serving":
            cluster.down()
        before = _claims(cluster, {})
        node = cluster.nodes[fault.node]
        for run, script in ((node.root, fault.root), (node.user, fault.user)):
            done = run("sh", "-c", script)
            insist(not done.trouble, f"{script}: {done.trouble}")
        fault.make(cluster)
        began = time.monotonic()
        new = _claims(cluster, before)
        seconds = time.monotonic() - began
        about = fault.about or fault.name
        hits = [key for key in new if key[0] == about and fault.node in key[1]]
        insist(bool(hits), f"not found; new are {_listed(new)}")
        more = {
            key: each for key, each in new.items() if key[0] not in (about, *fault.also)
        }
        insist(not more, f"claimed beside it: {_listed(more)}")
        # In backticks, or the whole of the hint up to a semicolon.
        hint = str(new[hits[0]]["hint"])
        quoted = re.search("`([^`]+)`", hint)
        command = quoted[1] if quoted else hint.partition(";")[0].split("\n")[0].strip()
        (fault.cured or paste)(cluster, command)
        left = _claims(cluster, before)
        insist(not left, f"after `{command}`: {_listed(left)}")
    outcome = f"yes, by {fault.by}" if fault.by else "yes"
    shown = f"`{command}`" if not fault.cured or "printed" in fault.by else ""
    found = f"`{about}` on {hits[0][1]}"
    return (f"`{fault.name}`", fault.what, found, shown, outcome, f"{seconds:.1f}")


def _claims(cluster: EmulatedCluster, before: Claims) -> Claims:
    """Return what doctor says is wrong and did not say before: errors and warnings."""
    done = cluster.laptop.patchkit("doctor", "--cluster", "--json")
    insist("Traceback" not in done.errors, done.errors)
    try:
        found = json.loads(done.output)["findings"]
    except (ValueError, KeyError):
        raise UnexpectedError(
            f"doctor says {done.output[:200]} {done.errors}"
        ) from None
    wrong = {
        (each["about"], each["where"]): each
        for each in found
        if each["level"] in ("error", "warning")
    }
    return {key: each for key, each in wrong.items() if key not in before}


def _listed(found: Claims) -> str:
    said = (
        f"{about} [{where}] {each['what']}" for (about, where), each in found.items()
    )
    return "; ".join(said) or "nothing"


def _wire(cluster: EmulatedCluster, *, cut: bool) -> None:
    wires = cluster.wires
    (wires.cut if cut else wires.join)("qsfp", WORKER)
    time.sleep(2)  # networkd takes the addresses away, or gives them


def _kill(cluster: EmulatedCluster) -> None:
    before = cluster.ranks()
    cluster.kill(WORKER, "worker")
    cluster.heals(before)


def _empty(cluster: EmulatedCluster, command: str) -> None:
    shown = paste(cluster, command)
    insist("filler" in shown, f"`{command}` does not show what is large: {shown}")
    cluster.worker.unfill()


def paste(cluster: EmulatedCluster, command: str) -> str:
    """Run a printed command on the laptop as it stands; return what it prints."""
    script = f'patchkit() {{ "{sys.executable}" -m patchkit "$@"; }}\n{command}'
    done = cluster.laptop.run("sh", "-c", script, seconds=300)
    insist(not done.trouble, f"{command}: {done.trouble}")
    return done.output


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
        "model",
        "a model's weights gone from one node",
        user=f"rm {HOME}{MODEL[1:]}/model.safetensors",
    ),
    Fault(
        "model-same",
        "another configuration of the model on one node",
        user=f"echo ' ' >> {HOME}{MODEL[1:]}/config.json",
    ),
    Fault(
        "edited", "another line in node.env of one node", user=f"echo '# mine' >> {ENV}"
    ),
    Fault(
        "unit-file",
        "a unit that systemd has not read since it was changed",
        user=f"sleep 1; touch .config/systemd/user/{UNIT}",
        begin="serving",
    ),
    Fault(
        "port",
        "another server at the rendezvous' port",
        make=lambda cluster: cluster.head.start_other(MASTER_PORT),
        node=HEAD,
    ),
    Fault(
        "left-over",
        "a process of the group left after `down`",
        user="systemd-run --user --setenv=PATCHKIT_CLUSTER=vllm sleep 1000",
    ),
    Fault(
        "rank-stopped",
        "a rank's worker process stopped (`kill -STOP`)",
        user="pkill -STOP -f 'VLLM::[W]orker'",
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
        cured=lambda cluster, _command: (cluster.patchkit("down"), cluster.up()),
        by="systemd at once; the warning stays until the next `up`",
    ),
    Fault(
        "image-missing",
        "the image removed from one node, with podman",
        user="podman rmi --all --force",
        engine="podman",
    ),
    Fault(
        "engine-rdma",
        "a file of an RDMA device that is open to a group alone, with podman",
        root="mkdir /dev/infiniband; install -m 660 /dev/null /dev/infiniband/uverbs0",
        engine="podman",
    ),
    Fault(
        "engine-stopped",
        "docker's daemon ended, and its socket",
        root="systemctl stop docker.socket docker",
        engine="docker",
    ),
)

if __name__ == "__main__":
    made = {fault.name: partial(prove, fault=fault) for fault in FAULTS}
    sys.exit(run_all(sys.argv[1:], PAGE, made, packages=["sudo"]))
