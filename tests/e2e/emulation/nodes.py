"""Machines made of namespaces: each has its own network, processes, host name, /tmp and /dev/shm.

The first process of a node is a child of this one and dies with it; with it the kernel ends all its
others, its mounts and its interfaces. So nothing is ever left over, even after kill -9.
``python nodes.py`` prints what is in the way on this machine, or nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from support import PACKAGES

INIT = Path(__file__).with_name("node_init.sh")
SPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")
TOOLS = ("ip", "unshare", "nsenter", "setpriv")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
START_SECONDS = 20
HOME = "/tmp/home"  # node_init.sh makes it
Env = Mapping[str, str] | None


class NodeError(Exception):
    """A node could not be made, or a command in one failed."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """``pid`` is its first process, seen from outside; ``number`` counts from 1."""

    name: str
    number: int
    pid: int
    path: str  # what PATH is inside
    logs: Path

    def file(self, path: str) -> Path:
        """A file inside the node, as it is reached from outside."""
        return Path(f"/proc/{self.pid}/root{path}")

    def log(self, name: str) -> Path:
        return self.logs / f"{self.name}-{name}.log"

    def words(self, *command: str | Path, seconds: int) -> list[str]:
        """Return the words that run a command inside; it is killed when the time is up."""
        enter = ("nsenter", f"--target={self.pid}", *SPACES)
        return [*enter, "timeout", "--signal=KILL", str(seconds), *map(str, command)]

    def environment(self, more: Env = None) -> dict[str, str]:
        """Return the variables that a command inside has."""
        return {"HOME": HOME, "LANG": "C.UTF-8", "PATH": self.path, **(more or {})}

    def start(
        self, *command: str | Path, log: str, seconds: int, env: Env = None
    ) -> subprocess.Popen[bytes]:
        """Start a command inside, output into the log."""
        with self.log(log).open("ab") as file:
            return subprocess.Popen(
                self.words(*command, seconds=seconds),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self.environment(env),
            )

    def run(self, *command: str, log: str, seconds: int = 60, env: Env = None) -> str:
        """Run a command inside to its end. Its output; raises NodeError if it fails."""
        begin = self.log(log).stat().st_size if self.log(log).exists() else 0
        code = self.start(*command, log=log, seconds=seconds, env=env).wait(
            seconds + 10
        )
        output = self.log(log).read_bytes()[begin:].decode(errors="replace")
        if code:
            what = "took too long" if code in {-9, 137} else f"exit status {code}"
            raise NodeError(
                f"{self.name}: {' '.join(command)}: {what}\n{output[-2000:]}"
            )
        return output


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Makes nodes; ``folder`` holds their files and logs, ``shared`` is what they see of /tmp.

    ``bin`` is the folder that comes first in their PATH.
    """

    folder: Path
    bin: Path
    shared: Sequence[Path] = ()

    @contextlib.contextmanager
    def up(self, hosts: Mapping[str, str]) -> Iterator[list[Node]]:
        """Nodes of these names, with this in /etc/hosts; without any interface but lo."""
        with contextlib.ExitStack() as stack:
            found = enumerate(hosts.items(), 1)
            yield [stack.enter_context(self._node(n, *each)) for n, each in found]

    @contextlib.contextmanager
    def _node(self, number: int, name: str, hosts: str) -> Iterator[Node]:
        folder = self.folder / name
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(hosts)
        (folder / "hostname").write_text(f"{name}\n")
        (folder / "resolv.conf").write_text("")
        shared = [str(each) for each in self.shared if each.is_relative_to("/tmp")]
        tie = (
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            *SPACES,
            "--fork",
            "--kill-child",
        )
        holder = subprocess.Popen(
            [*tie, "sh", str(INIT), name, str(folder), *shared],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PATH": SYSTEM_PATH},
        )
        try:
            assert holder.stdout is not None
            pid = holder.stdout.readline().strip()
            if not pid:
                raise NodeError(
                    f"{name}: {holder.communicate(timeout=START_SECONDS)[1].strip()}"
                )
            path = f"{self.bin}:{SYSTEM_PATH}"
            yield Node(
                name=name, number=number, pid=int(pid), path=path, logs=self.folder
            )
        finally:
            holder.kill()
            holder.communicate()


def grandchild(pid: int) -> int:
    """Return the first child of a process's first child, seen from here; 0 if there is none yet."""
    for _ in range(2):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        pid = int(children[0]) if children else 0
        if not pid:
            break
    return pid


def obstacle(*programs: str) -> str:
    """Why no node with these programs can be made here; empty if nothing is in the way."""
    if os.geteuid():
        return "namespaces with interfaces and mounts of their own need root"
    for program in (*TOOLS, *programs):
        if shutil.which(program) is None:
            return f"{program} is not installed: sudo apt install {PACKAGES.get(program, program)}"
    trial = [
        "unshare",
        *SPACES,
        "--fork",
        "sh",
        "-c",
        "mount -t tmpfs tmpfs /mnt && ip link show",
    ]
    done = subprocess.run(trial, capture_output=True, text=True, timeout=START_SECONDS)
    return (
        f"namespaces are not allowed here: {done.stderr.strip()}"
        if done.returncode
        else ""
    )


if __name__ == "__main__":
    sys.stdout.write(obstacle())
