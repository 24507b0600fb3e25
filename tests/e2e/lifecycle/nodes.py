"""Nodes that boot: systemd, sshd, a user with lingering, a disk that outlives a power cut.

A node is an overlay of the common file system, booted by systemd-nspawn in the namespaces of the
switch. Its disk and its /home are in memory and belong to the switch: when that ends, by whatever
signal, the kernel ends all processes of all nodes and takes their disks back.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e.emulation import wires
from e2e.emulation.nodes import SPACES, SYSTEM_PATH, Node, NodeError, grandchild
from e2e.lifecycle.rootfs import UID, USER
from patchkit.follow import Completed
from patchkit.process import attempt

BOOT_SECONDS = 60
HOME = f"/home/{USER}"
FILLER = f"{HOME}/filler"
FIREWALL = (
    "INPUT",
    "!",
    "-i",
    "lo",
    "-p",
    "tcp",
    "--syn",
    "!",
    "--dport",
    "22",
    "-j",
    "DROP",
)
# $1: the common file system, $2: the node's folder, $3: the size of its /home
DISK = """\
set -eu
mkdir -p "$2/up" "$2/work" "$2/root" "$2/home"
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/up,workdir=$2/work" "$2/root"
mount -t tmpfs -o "size=$3,mode=755" tmpfs "$2/home"
cp -a "$1/home/." "$2/home"
"""
# Enters control groups of its own: systemd could not end units of two nodes that share one.
BOOT = (
    'while [ "$1" != -- ]; do echo 0 > "$1/cgroup.procs"; shift; done; shift; exec "$@"'
)


@dataclass(kw_only=True)
class SystemdNode:
    """``init`` is its process 1, seen from outside; 0 while it is off."""

    name: str
    number: int
    switch: Node
    wires: wires.Wiring
    groups: Sequence[Path]
    logs: Path
    shared: Sequence[Path]  # folders of this machine that it sees, read only
    init: int = 0
    nspawn: subprocess.Popen[bytes] | None = None

    @property
    def disk(self) -> str:
        return f"/tmp/{self.name}"

    def build(
        self, root: Path, home: str, files: Mapping[str, str], ssh: Mapping[str, str]
    ) -> None:
        """Make its disk, with these files of its own, and the user's ``ssh`` folder."""
        self.switch.run("sh", "-c", DISK, "sh", str(root), self.disk, home, log="made")
        own = {
            "/etc/hostname": f"{self.name}\n",
            "/etc/machine-id": f"{uuid.uuid4().hex}\n",
        }
        top = self.switch.file(f"{self.disk}/root")
        for path, text in {**own, **wires.network_files(self.number), **files}.items():
            (top / path.lstrip("/")).write_text(text)
            (top / path.lstrip("/")).chmod(0o600 if path.endswith("_key") else 0o644)
        put_ssh(self.switch.file(f"{self.disk}{HOME}/.ssh"), ssh, UID)

    def start(self) -> None:
        """Switch it on; `wait` says when it is up."""
        bridges = [f"{self.name}-{bridge}" for bridge in wires.BRIDGES]
        ends = zip(bridges, (wires.LAN, *wires.halves(self.number)), strict=True)
        with (self.logs / f"{self.name}-console.log").open("ab") as console:
            self.nspawn = subprocess.Popen(
                [
                    *(
                        "nsenter",
                        f"--target={self.switch.pid}",
                        *SPACES,
                        "sh",
                        "-c",
                        BOOT,
                        "sh",
                    ),
                    *(
                        *map(str, self.groups),
                        "--",
                        "systemd-nspawn",
                        "--quiet",
                        "--boot",
                    ),
                    *(f"--directory={self.disk}/root", f"--machine={self.name}"),
                    *(
                        "--register=no",
                        "--keep-unit",
                        "--console=pipe",
                        "--private-network",
                    ),
                    *("--link-journal=no", "--resolv-conf=off", "--timezone=off"),
                    *(f"--network-veth-extra={here}:{there}" for here, there in ends),
                    *(f"--bind={self.disk}/home:/home", f"--hostname={self.name}"),
                    *(f"--bind-ro={path}" for path in self.shared),
                    "--system-call-filter=@keyring bpf",  # container runtimes call them
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env={"PATH": SYSTEM_PATH, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
            )
        self.wires.attach(self.name)

    def wait(self) -> None:
        """Return when its user's own units can be started, and sshd answers."""
        self._until(self._find_init, "has no process 1")
        ready = f"systemctl -q is-active ssh user@{UID}.service && [ -S /run/user/{UID}/bus ]"
        self._until(
            lambda: not self.root("sh", "-c", ready).trouble, "does not come up"
        )

    def boot(self) -> None:
        self.start()
        self.wait()

    def kill(self) -> None:
        """Cut its power: all processes end at once, and nobody on the network hears of it."""
        self.wires.silence(self.name)
        os.kill(self.init, signal.SIGKILL)
        self._ended()

    def shut_down(self) -> None:
        """Shut it down as `systemctl reboot` does, up to where the firmware would take over."""
        self.root("systemctl", "reboot")
        self._ended()

    def user(
        self, *words: str | Path, seconds: int = 30, input: bytes = b""
    ) -> Completed:
        """Run a command as the user, in a session with the user's own systemd."""
        ids = ("setpriv", f"--reuid={UID}", f"--regid={UID}", "--init-groups")
        env = (f"HOME={HOME}", f"USER={USER}", f"XDG_RUNTIME_DIR=/run/user/{UID}")
        return self._run((*ids, "env", f"--chdir={HOME}", *env, *words), seconds, input)

    def root(
        self, *words: str | Path, seconds: int = 30, input: bytes = b""
    ) -> Completed:
        return self._run(("env", "HOME=/root", *words), seconds, input)

    def start_other(self, port: int, *words: str, restarts: Sequence[str] = ()) -> None:
        """Let another server of the user's listen at a port; return when it does.

        ``restarts`` are properties of its unit, `other`.
        """
        own = words or (
            "python3",
            "-m",
            "http.server",
            "--bind",
            wires.qsfp_ip(self.number),
            port,
        )
        options = (f"--property={each}" for each in restarts)
        self.user("systemd-run", "--user", "--unit=other", *options, *map(str, own))
        if not restarts:  # else it waits until the port is free
            busy = ("sh", "-c", f"ss -Hltnp 'sport = :{port}' | grep -q '\"python3\"'")
            self._until(
                lambda: not self.user(*busy).trouble, f"has nobody at port {port}"
            )

    def stop_other(self) -> None:
        self.user("systemctl", "--user", "stop", "other")

    def file(self, path: str) -> Path:
        """Return a file of its, as it is reached from outside while it is on."""
        return Path(f"/proc/{self.init}/root{path}")

    def fill(self) -> None:
        """Leave no byte free in the user's home, also where something is deleted meanwhile."""
        again = f"while :; do cat /dev/zero >> {FILLER}; done"
        self.user(
            "systemd-run", "--user", "--quiet", "--unit=filler", "sh", "-c", again
        )
        is_full = f"! printf . 2> /dev/null >> {FILLER}"
        self._until(lambda: not self.user("sh", "-c", is_full).trouble, "is not full")

    def unfill(self) -> None:
        self.user("systemctl", "--user", "stop", "filler")
        self.user("rm", "-f", FILLER)

    def refuse_ssh(self) -> None:
        """End sshd and all its connections."""
        self.root(
            "sh", "-c", "systemctl stop ssh.socket ssh.service; pkill -KILL sshd; true"
        )

    def drop_all_but_ssh(self) -> None:
        """Let a firewall drop each new connection over TCP from outside, but for ssh."""
        done = self.root("iptables", "-I", *FIREWALL)
        if done.trouble:
            raise NodeError(f"{self.name}: no firewall: {done.trouble}")

    def drop_nothing(self) -> None:
        self.root("iptables", "-D", *FIREWALL)

    def keep_journal(self) -> None:
        """Write the journal of all boots, of the system and of the user's units, to the logs."""
        words = ("journalctl", "--no-pager", "--merge", "--output=short-iso-precise")
        if self.init:
            text = self.root(*words, seconds=60).output
            (self.logs / f"{self.name}-journal.log").write_text(text)

    def _run(
        self, words: Sequence[str | Path], seconds: int, input: bytes
    ) -> Completed:
        if not self.init:
            raise NodeError(f"{self.name} is off")
        limit = ("timeout", "--signal=KILL", str(seconds))
        clean = ("env", "-i", f"PATH={SYSTEM_PATH}", "LANG=C.UTF-8", "TERM=dumb")
        enter = ("nsenter", f"--target={self.init}", "--all", *clean, *limit)
        more = {"input": input} if input else {}
        return attempt(*enter, *words, timeout=seconds + 10, **more)

    def _find_init(self) -> bool:
        """Look for the process of nspawn's that is process 1 of its namespace."""
        assert self.nspawn is not None
        found = grandchild(
            self.nspawn.pid
        )  # nsenter's child is nspawn, whose child it is
        if found and Path(f"/proc/{found}/comm").read_text() == "systemd\n":
            self.init = found
        return bool(self.init)

    def _ended(self) -> None:
        assert self.nspawn is not None
        try:
            self.nspawn.wait(BOOT_SECONDS)
        except subprocess.TimeoutExpired:
            raise NodeError(f"{self.name} does not end") from None
        self.init = 0

    def _until(self, condition: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + BOOT_SECONDS
        while not condition():
            if self.nspawn is None or self.nspawn.poll() is not None:
                raise NodeError(f"{self.name}: systemd-nspawn ended; see {self.logs}")
            if time.monotonic() > deadline:
                raise NodeError(f"{self.name} {otherwise}; see {self.logs}")
            time.sleep(0.1)


def put_ssh(folder: Path, files: Mapping[str, str], owner: int) -> None:
    """Write a user's `.ssh` as ssh wants it: nobody else may read it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    for path in (folder, *folder.iterdir()):
        os.chown(path, owner, owner)
