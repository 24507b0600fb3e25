"""Keep the wheels that a node installs, and send them on to the next one. Runs on the node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from patchkit.cluster.ssh.rsync import copied, rsync_words
from patchkit.digests import digest, sha256_of
from patchkit.durable.failure import translated
from patchkit.records import Sha256, matching, record

_FILE = r"[A-Za-z0-9][\w.+!-]*\.whl"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWheel:
    """A wheel as a wheelhouse lists it; ``unpacked`` is the size of its members in bytes."""

    name: Annotated[str, matching(_FILE, "the name of a wheel")]
    sha256: Sha256
    size: int
    unpacked: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelLock:
    """Hold what nodes install: the text of requirements.txt, the wheels, and for which Python.

    ``cpu`` is the one that all wheels are for, "" for any.
    """

    requirements: str
    cpu: str
    python: Annotated[str, matching(r"3\.\d+", "a release of Python")]
    wheels: tuple[NodeWheel, ...]

    @property
    def id(self) -> str:
        """Return the name of the installation: the same one for the same bytes and Python."""
        rows = sorted(f"{wheel.name} {wheel.sha256}" for wheel in self.wheels)
        return digest("\n".join([self.requirements, *rows, self.python]))[:12]


def share_folder(name: str) -> Path:
    """Return a folder of what patchkit keeps for this user: ``wheelhouse`` or ``venvs``."""
    return Path.home() / ".local" / "share" / "patchkit" / name


def find_lacking(wheels: Iterable[NodeWheel]) -> tuple[str, ...]:
    """Return the wheels that are not here, or whose bytes are others: a part, for one."""
    lacking = []
    for wheel in wheels:
        path = share_folder("wheelhouse") / wheel.name
        there = path.is_file() and not path.is_symlink() and path.stat().st_size == wheel.size
        if not there or sha256_of(path) != wheel.sha256:
            lacking.append(wheel.name)
    return tuple(lacking)


def receive_wheels(wheels: Sequence[Any]) -> tuple[str, ...]:
    """Make the folder of the wheels; return the names of those that are to be sent."""
    folder = share_folder("wheelhouse")
    with translated(at=folder):
        folder.mkdir(parents=True, exist_ok=True)
    return find_lacking(record(tuple[NodeWheel, ...], list(wheels)))


def send_wheels(
    folder: str, names: Sequence[str], ssh: Sequence[str], destination: str, target: str
) -> Iterator[dict[str, Any]]:
    """Yield the progress in bytes, at last ``{"result": Copied}``.

    ``ssh`` are the words up to the destination; "" copies on this machine. Raises HostError or
    StorageError, as rsync fails.
    """
    sources = [Path(folder).expanduser() / name for name in names]
    # What is sent has other bytes there than here, whatever size and time say: a part of it.
    options = ("-tp", "--ignore-times")
    words = rsync_words(options, [str(source) for source in sources], ssh, destination, target)
    total = sum(source.stat().st_size for source in sources)
    took = yield from copied(words, total, destination)
    yield {"result": asdict(took)}
