"""Nodes with systemd, a switch and a laptop: what a scenario works with; nothing stays."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from e2e.emulation import wires
from e2e.emulation.nodes import SPACES, Node, NodeError, Nodes
from e2e.lifecycle import wiring
from e2e.lifecycle.nodes import SystemdNode, put_ssh
from e2e.lifecycle.rootfs import USER
from patchkit.follow import Completed
from patchkit.process import attempt

ROOT = Path(__file__).parents[3]
BIN = Path(sys.prefix) / "bin"
GROUPS = Path("/sys/fs/cgroup")
HOME = "/tmp/home"  # of the laptop's user; tests/e2e/emulation/node_init.sh makes it
SIZE = "256m"  # of a node's /home
# Reads until the one who holds the other end has ended, then removes the control groups, as soon
# as the kernel has ended what was in them.
SWEEP = """\
read -r _
for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
  find "$@" -depth -type d -exec rmdir {} + 2> /dev/null && exit
  sleep 0.5
done
"""


@dataclass(frozen=True)
class Laptop:
    """Where patchkit is run: on the LAN only, and its user's ~/.ssh knows the nodes."""

    node: Node

    def run(self, *words: str | Path, seconds: int = 120) -> Completed:
        """Run a command there. ``sys.executable`` and this checkout are what they are here."""
        return attempt(*self._words(*words, seconds=seconds), timeout=seconds + 10)

    def patchkit(self, *words: str | Path, seconds: int = 300) -> Completed:
        return self.run(sys.executable, "-m", "patchkit", *words, seconds=seconds)

    def start(self, *words: str | Path, log: str, seconds: int = 300) -> subprocess.Popen[bytes]:
        """Start a command there, output into the log; `kill` ends it."""
        with self.node.log(log).open("ab") as file:
            return subprocess.Popen(
                self._words(*words, seconds=seconds),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def start_patchkit(self, *words: str, log: str) -> subprocess.Popen[bytes]:
        return self.start(sys.executable, "-m", "patchkit", *words, log=log)

    def said(self, log: str) -> str:
        """Return what was written into a log."""
        return self.node.log(log).read_text()

    def kill(self, started: subprocess.Popen[bytes], number: int = signal.SIGKILL) -> None:
        """Kill what `start` started: that process alone, not what it has started itself."""
        found = started.pid
        for _ in range(2):  # nsenter's child is timeout, whose child it is
            children = Path(f"/proc/{found}/task/{found}/children").read_text().split()
            if not children:
                raise NodeError(f"{started.args!r} has ended, or has not begun")
            found = int(children[0])
        os.kill(found, number)

    def _words(self, *words: str | Path, seconds: int) -> list[str]:
        limit = ("timeout", "--signal=KILL", str(seconds))
        env = ("env", "-i", f"--chdir={HOME}", f"HOME={HOME}", f"PATH={self.node.path}")
        more = ("LANG=C.UTF-8", "TERM=dumb", f"PYTHONPATH={ROOT}", "PYTHONDONTWRITEBYTECODE=1")
        enter = ("nsenter", f"--target={self.node.pid}", *SPACES, *env, *more, *limit)
        return [*enter, *map(str, words)]


@dataclass(frozen=True)
class Rack:
    """``nodes`` are spark1, spark2 …, by name; ``folder`` is for logs."""

    nodes: Mapping[str, SystemdNode]
    laptop: Laptop
    wires: wiring.Wiring
    folder: Path

    def __getitem__(self, name: str) -> SystemdNode:
        return self.nodes[name]

    def boot(self) -> None:
        """Boot all nodes side by side."""
        for node in self.nodes.values():
            node.start()
        for node in self.nodes.values():
            node.wait()


@contextlib.contextmanager
def up(
    root: Path, folder: Path, count: int = 2, *, home: str = SIZE, shared: Iterable[Path] = ()
) -> Iterator[Rack]:
    """Boot nodes with this file system; their journals are in ``folder`` afterwards.

    ``home`` is the size of their /home, ``shared`` are folders that they see, read only.
    """
    shutil.rmtree(folder, ignore_errors=True)
    numbers = {f"spark{number}": number for number in range(1, count + 1)}
    keys = _make_keys(folder / "keys", ["id_ed25519", *numbers])
    known = (
        f"{','.join(wiring.names(name, number))} {keys[f'{name}.pub']}"
        for name, number in numbers.items()
    )
    ssh = {name: keys[name] for name in ("id_ed25519", "id_ed25519.pub")}
    ssh |= {"authorized_keys": keys["id_ed25519.pub"], "known_hosts": "".join(known)}
    hosts = wires.hosts([*numbers])
    seen = (ROOT, *shared)
    places = Nodes(folder=folder, bin=BIN, shared=(*seen, Path(sys.prefix), root))
    with (
        _groups(folder.name, numbers) as groups,
        places.up({"switch": "", "laptop": hosts}) as found,
    ):
        switch, laptop = found
        _run(switch, "umount", "/sys")  # its own, which hides the control groups
        wired = wiring.Wiring(switch)
        wired.bridges()
        wired.laptop(laptop)
        # As of somebody with another user name than on the nodes.
        config = [f"Host {name}\n  HostName {wires.lan_ip(n)}\n" for name, n in numbers.items()]
        _settle(laptop, {**ssh, "config": "".join(f"{host}  User {USER}\n" for host in config)})
        nodes = {
            name: SystemdNode(
                name=name,
                number=number,
                switch=switch,
                wires=wired,
                groups=groups[name],
                logs=folder,
                shared=seen,
            )
            for name, number in numbers.items()
        }
        for name, node in nodes.items():
            key = "/etc/ssh/ssh_host_ed25519_key"
            own = {key: keys[name], f"{key}.pub": keys[f"{name}.pub"]}
            node.build(root, home, {"/etc/hosts": hosts, **own}, ssh)
        try:
            rack = Rack(nodes, Laptop(laptop), wired, folder)
            rack.boot()
            yield rack
        finally:
            for node in nodes.values():
                node.keep_journal()


def _make_keys(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Make a pair of keys for each: known before a node boots, so none is accepted blindly."""
    folder.mkdir(parents=True, mode=0o700)
    for name in names:
        words = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", folder / name)
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    return {path.name: path.read_text() for path in folder.iterdir()}


@contextlib.contextmanager
def _groups(rack: str, names: Iterable[str]) -> Iterator[dict[str, list[Path]]]:
    """Make control groups for each node; they go away even if this process is killed."""
    # Of cgroup v1 systemd needs the hierarchy with its name, and `unified` where that is beside it.
    tops = [GROUPS / each for each in ("systemd", "unified") if (GROUPS / each).is_dir()]
    own = [top / f"patchkit-{os.getpid()}-{rack}" for top in tops or [GROUPS]]
    groups = {name: [each / name for each in own] for name in names}
    sweep = subprocess.Popen(
        ["sh", "-c", SWEEP, "sh", *map(str, own)],
        stdin=subprocess.PIPE,
        start_new_session=True,  # so that an interrupt of the terminal does not end it
    )
    try:
        for each in (group for found in groups.values() for group in found):
            each.mkdir(parents=True)
        yield groups
    finally:
        sweep.communicate()


def _settle(laptop: Node, ssh: Mapping[str, str]) -> None:
    """Give the laptop's user a home with this `.ssh`: ssh takes the home that passwd names."""
    put_ssh(laptop.file(f"{HOME}/.ssh"), ssh, os.getuid())
    lines = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
    moved = [
        [*line[:5], HOME, *line[6:]] if line[2] == str(os.getuid()) else line for line in lines
    ]
    laptop.file("/tmp/passwd").write_text("".join(f"{':'.join(line)}\n" for line in moved))
    _run(laptop, "mount", "--bind", "/tmp/passwd", "/etc/passwd")


def _run(node: Node, *words: str) -> None:
    done = attempt("nsenter", f"--target={node.pid}", *SPACES, *words)
    if done.trouble:
        raise NodeError(f"{node.name}: {done.trouble}")
