"""Keep the wheels that a node installs, and send them on to the next one. Runs on the node."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from patchkit.digests import digest, sha256_of
from patchkit.durable.failure import translated
from patchkit.errors import HostError, StorageError, UsageError
from patchkit.process import Completed, output
from patchkit.quoting import quoted
from patchkit.records import Sha256, matching, record

RSYNC = "sudo apt install rsync"
_PROGRESS = re.compile(r"\s*(\d+)\s+\d+%\s")  # bytes, of --info=progress2
_SENT = re.compile(r"^Literal data: (\d+) bytes", re.MULTILINE)
_FILE = r"[A-Za-z0-9][\w.+!-]*\.whl"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWheel:
    """A wheel as a wheelhouse lists it; ``unpacked`` is the size of its members in bytes."""

    name: Annotated[str, matching(_FILE, "the name of a wheel")]
    sha256: Sha256
    size: int
    unpacked: int
    cpus: tuple[str, ...]

    @property
    def project(self) -> str:
        """Return the project as .dist-info folders are compared."""
        return self.name.partition("-")[0].lower().replace(".", "_")


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelLock:
    """What the nodes install: the text of requirements.txt, its Python, ``3.12``, the wheels."""

    requirements: str
    python: Annotated[str, matching(r"3\.\d+", "a release of Python")]
    wheels: tuple[NodeWheel, ...]

    def on(self, cpu: str) -> tuple[NodeWheel, ...]:
        """Return the wheels of a node with this CPU."""
        return tuple(each for each in self.wheels if {cpu, "any"} & {*each.cpus})

    def name_on(self, cpu: str) -> str:
        """Return the name of an installation: the same one for the same bytes and Python."""
        rows = sorted(f"{each.name} {each.sha256}" for each in self.on(cpu))
        return digest("\n".join([self.requirements, *rows, self.python]))[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWheels:
    """What a copy took: bytes that went over the link, and seconds."""

    sent: int
    seconds: float

    @property
    def speed(self) -> float:
        """Return MB/s."""
        return self.sent / 1e6 / max(self.seconds, 1e-3)


def share_folder() -> Path:
    """Return the folder of what patchkit keeps for this user."""
    return Path.home() / ".local" / "share" / "patchkit"


def wheel_folder() -> Path:
    """Return the folder of the wheels; several installations share it."""
    return share_folder() / "wheelhouse"


def lacking(wheels: Iterable[NodeWheel]) -> tuple[NodeWheel, ...]:
    """Return the wheels that are not here, or whose bytes are others: a part, for one."""

    def is_here(wheel: NodeWheel) -> bool:
        path = wheel_folder() / wheel.name
        if path.is_symlink() or not path.is_file() or path.stat().st_size != wheel.size:
            return False
        return sha256_of(path) == wheel.sha256

    return tuple(each for each in wheels if not is_here(each))


def receive(wheels: Sequence[Any]) -> list[str]:
    """Make the folder of the wheels; return the names of those that are to be sent."""
    with translated(at=wheel_folder()):
        wheel_folder().mkdir(parents=True, exist_ok=True)
    return [each.name for each in lacking(record(tuple[NodeWheel, ...], list(wheels)))]


def send_words(
    folder: str, names: Sequence[str], ssh: Sequence[str], destination: str, target: str
) -> tuple[str, ...]:
    """Return the rsync command for some wheels; without a destination it copies on this machine.

    Raises UsageError for what rsync would take for something else.
    """
    if ":" in destination or "/" in destination or any(" " in word for word in ssh):
        raise UsageError(f"{destination!r} is not a host", hint="write it as for ssh: user@host")
    return (
        "rsync",
        # What is sent has other bytes there than here, whatever size and time say: a part of it.
        *("-tp", "--ignore-times", "--partial", "--protect-args"),
        *("--info=progress2", "--stats", "--no-human-readable", "--outbuf=L"),
        # Plain words without a blank, which rsync splits at.
        *(("-e", " ".join(ssh)) if destination else ()),
        "--",
        *(f"{folder}/{name}" for name in names),
        f"{destination}:{target}/" if destination else f"{target}/",
    )


def send_wheels(
    folder: str, names: Sequence[str], ssh: Sequence[str], destination: str, target: str
) -> Iterator[dict[str, Any]]:
    """Yield the progress in bytes, at last ``{"result": SentWheels}``.

    Raises HostError or StorageError, as rsync fails.
    """
    if not shutil.which("rsync"):
        raise HostError("rsync is not installed", why="wheels are copied with it", hint=RSYNC)
    source = Path(folder).expanduser()
    total = sum((source / each).stat().st_size for each in names)
    begun = time.monotonic()
    words = send_words(str(source), names, ssh, destination, target)
    running = output(*words, env={**os.environ, "LC_ALL": "C"})
    while True:
        try:
            said = _PROGRESS.match(next(running))
        except StopIteration as end:
            done: Completed = end.value
            break
        if said:
            yield {"done": min(int(said[1]), total), "total": total}
    if done.trouble:
        raise _failure(done, destination or "this machine")
    sent = _SENT.search(done.output)
    seconds = time.monotonic() - begun
    yield {"result": asdict(SentWheels(sent=int(sent[1]) if sent else 0, seconds=seconds))}


def _failure(done: Completed, destination: str) -> HostError | StorageError:
    lines = [line.strip() for line in done.output.split("\n")]
    told = [line for line in lines if line and "%" not in line and "rsync error" not in line]
    told = [line for line in told if not line.startswith("rsync: connection unexpectedly closed")]
    what = f"rsync to {destination} failed: {told[-1] if told else done.trouble}"
    if done.status == 255 or "unexplained error (code 255)" in done.output:
        return HostError(what, why="ssh did not connect", hint=quoted("ssh", destination, "true"))
    if "command not found" in done.output or "rsync: not found" in done.output:
        return HostError(what, why=f"rsync is not installed on {destination}", hint=RSYNC)
    why = "the disk there is full" if "No space left" in done.output else "the link was cut"
    return StorageError(what, why=why, hint="run the same command again: it goes on where it was")
