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


def share_folder() -> Path:
    """Return the folder of what patchkit keeps for this user."""
    return Path.home() / ".local" / "share" / "patchkit"


def wheel_folder() -> Path:
    """Return the folder of the wheels; several installations share it."""
    return share_folder() / "wheelhouse"


def find_lacking(wheels: Iterable[NodeWheel]) -> tuple[NodeWheel, ...]:
    """Return the wheels that are not here, or whose bytes are others: a part, for one."""

    def is_here(wheel: NodeWheel) -> bool:
        path = wheel_folder() / wheel.name
        if path.is_symlink() or not path.is_file() or path.stat().st_size != wheel.size:
            return False
        return sha256_of(path) == wheel.sha256

    return tuple(each for each in wheels if not is_here(each))


def receive_wheels(wheels: Sequence[Any]) -> list[str]:
    """Make the folder of the wheels; return the names of those that are to be sent."""
    with translated(at=wheel_folder()):
        wheel_folder().mkdir(parents=True, exist_ok=True)
    return [each.name for each in find_lacking(record(tuple[NodeWheel, ...], list(wheels)))]


def send_wheels(
    folder: str, names: Sequence[str], ssh: Sequence[str], destination: str, target: str
) -> Iterator[dict[str, Any]]:
    """Yield the progress in bytes, at last ``{"result": Copied}``.

    ``ssh`` are the words up to the destination; "" copies on this machine. Raises HostError or
    StorageError, as rsync fails.
    """
    source = Path(folder).expanduser()
    total = sum((source / each).stat().st_size for each in names)
    # What is sent has other bytes there than here, whatever size and time say: a part of it.
    options = ("-tp", "--ignore-times")
    sources = [f"{source}/{name}" for name in names]
    words = rsync_words(options, sources, ssh, destination, target)
    took = yield from copied(words, total, destination)
    yield {"result": asdict(took)}
