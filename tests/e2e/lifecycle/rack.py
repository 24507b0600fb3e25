"""Boot nodes with systemd, a switch and a laptop: what a scenario works with; nothing stays."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from e2e.emulation import wires
from e2e.emulation.nodes import HOME, Node, NodeError, Nodes, grandchild
from e2e.lifecycle.nodes import SystemdNode, put_ssh
from e2e.lifecycle.rootfs import USER
from patchkit.follow import Completed
from patchkit.process import attempt

ROOT = Path(__file__).parents[3]
BIN = Path(sys.prefix) / "bin"
GROUPS = Path("/sys/fs/cgroup")
ENV = {"TERM": "dumb", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
SIZE = "256m"  # of a node's /home
LAPTOP = 100  # the last number of its address
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
        inside = self.node.words("env", f"--chdir={HOME}", *words, seconds=seconds)
        return attempt(*inside, env=self.node.environment(ENV), timeout=seconds + 10)

    def patchkit(self, *words: str | Path, seconds: int = 300) -> Completed:
        return self.run(sys.executable, "-m", "patchkit", *words, seconds=seconds)

    def start(self, *words: str, log: str) -> subprocess.Popen[bytes]:
        """Start a command there, output into the log; `kill` ends it."""
        inside = ("env", f"--chdir={HOME}", *words)
        return self.node.start(*inside, log=log, seconds=300, env=ENV)

    def start_patchkit(self, *words: str, log: str) -> subprocess.Popen[bytes]:
        return self.start(sys.executable, "-m", "patchkit", *words, log=log)

    def said(self, log: str) -> str:
        """Return what was written into a log."""
        return self.node.log(log).read_text()

    def kill(
        self, started: subprocess.Popen[bytes], number: int = signal.SIGKILL
    ) -> None:
        """Kill what was started: that process alone, not what it has started itself."""
        if not (found := grandchild(started.pid)):  # of nsenter, whose child is timeout
            raise NodeError(f"{started.args!r} has ended, or has not begun")
        os.kill(found, number)


Parts = tuple[Mapping[str, SystemdNode], Laptop, wires.Wiring]


@contextlib.contextmanager
def up(
    root: Path,
    folder: Path,
    count: int = 2,
    *,
    home: str = SIZE,
    shared: Iterable[Path] = (),
) -> Iterator[Parts]:
    """Boot spark1, spark2 … with this file system; ``folder`` has their journals afterwards.

    ``home`` is the size of their /home, ``shared`` are folders that they see, read only.
    """
    shutil.rmtree(folder, ignore_errors=True)
    numbers = {f"spark{number}": number for number in range(1, count + 1)}
    keys, ssh = _make_keys(folder / "keys", numbers)
    hosts, seen = wires.hosts([*numbers]), (ROOT, *shared)
    places = Nodes(folder=folder, bin=BIN, shared=(*seen, Path(sys.prefix), root))
    with (
        _groups(folder.name, numbers) as groups,
        places.up({"switch": "", "laptop": hosts}) as (switch, laptop),
    ):
        switch.run(
            "umount", "/sys", log="made"
        )  # its own, which hides the control groups
        wires.make_bridges(switch)
        wires.plug(laptop, wires.LAN, switch, "lan")
        own = f"address add {wires.lan_ip(LAPTOP)}/24 dev {wires.LAN}"
        wires.ip(laptop, "link set lo up", own, f"link set {wires.LAN} up")
        # As of somebody with another user name than on the nodes.
        config = [
            f"Host {name}\n  HostName {wires.lan_ip(n)}\n"
            for name, n in numbers.items()
        ]
        _settle(
            laptop,
            {**ssh, "config": "".join(f"{host}  User {USER}\n" for host in config)},
        )
        wired = wires.Wiring(switch)
        node_here = partial(
            SystemdNode,
            switch=switch,
            wires=wired,
            logs=folder,
            shared=(*seen, *_python_folders()),
        )
        nodes = {
            n: node_here(name=n, number=numbers[n], groups=groups[n]) for n in numbers
        }
        for name, node in nodes.items():
            key = "/etc/ssh/ssh_host_ed25519_key"
            own_keys = {key: keys[name], f"{key}.pub": keys[f"{name}.pub"]}
            node.build(root, home, {"/etc/hosts": hosts, **own_keys}, ssh)
        try:
            for node in nodes.values():
                node.start()
            for node in nodes.values():
                node.wait()
            yield nodes, Laptop(laptop), wired
        finally:
            for node in nodes.values():
                node.keep_journal()


def _python_folders() -> set[Path]:
    """Return where the Python of this process and its libraries lie, for patchkit on a node.

    What lies in /usr is the node's own.
    """
    libraries = [entry for entry in sys.path if entry.endswith("site-packages")]
    places = {Path(each) for each in (sys.prefix, sys.base_prefix, *libraries)}
    return {place for place in places if not place.is_relative_to("/usr")}


def _make_keys(
    folder: Path, numbers: Mapping[str, int]
) -> tuple[dict[str, str], dict[str, str]]:
    """Make all pairs, so that no node's is accepted blindly; return them, and the user's `.ssh`."""
    folder.mkdir(parents=True, mode=0o700)
    for name in ("id_ed25519", *numbers):
        words = (
            "ssh-keygen",
            "-q",
            "-t",
            "ed25519",
            "-N",
            "",
            "-C",
            name,
            "-f",
            folder / name,
        )
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    keys = {path.name: path.read_text() for path in folder.iterdir()}
    known = (
        f"{name},{wires.lan_ip(n)},{wires.qsfp_ip(n)},{wires.qsfp_ip(n, 1)} {keys[f'{name}.pub']}"
        for name, n in numbers.items()
    )
    ssh = {name: keys[name] for name in ("id_ed25519", "id_ed25519.pub")}
    ssh |= {"authorized_keys": keys["id_ed25519.pub"], "known_hosts": "".join(known)}
    return keys, ssh


@contextlib.contextmanager
def _groups(rack: str, names: Iterable[str]) -> Iterator[dict[str, list[Path]]]:
    """Make control groups for each node; they go away even if this process is killed."""
    # Of cgroup v1 systemd needs the hierarchy with its name, and `unified` where that is beside it.
    tops = [
        GROUPS / each for each in ("systemd", "unified") if (GROUPS / each).is_dir()
    ]
    own = [top / f"patchkit-{os.getpid()}-{rack}" for top in tops or [GROUPS]]
    groups = {name: [each / name for each in own] for name in names}
    words = ("sh", "-c", SWEEP, "sh", *map(str, own))
    # A session of its own, so that an interrupt of the terminal does not end it.
    sweep = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
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
        [*line[:5], HOME, *line[6:]] if line[2] == str(os.getuid()) else line
        for line in lines
    ]
    laptop.file("/tmp/passwd").write_text(
        "".join(f"{':'.join(line)}\n" for line in moved)
    )
    laptop.run("mount", "--bind", "/tmp/passwd", "/etc/passwd", log="made")
