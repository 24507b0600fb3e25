"""The netplan file on disk: written, kept a way back, put back. Killed at any moment, it can go on.

Below ``<root>/var/lib/patchkit/net/`` every change is a numbered folder

    step.json   digests of the file before and after, its mode before, the addresses given
    before      the bytes that were replaced, absent if there was no file
    after       the bytes that were written
    done        there once the network has them

which exists as a whole or not at all: it is made under another name, then renamed. A folder without
``done`` is a change that was cut short; `recover` puts back what was there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from patchkit.durable import sync, translated, write_new
from patchkit.errors import BusyError, DriftError, StorageError, UsageError
from patchkit.runtime.net_conflicts import OURS

STATE = Path("var/lib/patchkit/net")
MODE = 0o600  # netplan warns about files that others may read


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One change. Digests are ``""`` for no file; ``mode`` is that of the file before."""

    before: str
    after: str
    mode: int
    addresses: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the file and its history lie, below a root."""

    root: Path

    @property
    def file(self) -> Path:
        return self.root / OURS

    @property
    def state(self) -> Path:
        return self.root / STATE

    def text(self) -> bytes | None:
        try:
            return self.file.read_bytes()
        except FileNotFoundError:
            return None

    def steps(self) -> tuple[Path, ...]:
        """The folders of the changes, the oldest first."""
        numbers = (each for each in self.state.glob("*") if each.name.isdigit())
        return tuple(sorted(numbers, key=lambda each: int(each.name)))

    def unfinished(self) -> Path | None:
        """The change that was cut short, if there is one: always the last."""
        last = self.steps()[-1:]
        return last[0] if last and not (last[0] / "done").exists() else None

    def applied(self) -> Mapping[str, Sequence[str]]:
        """All addresses that patchkit has given: netdev → ``address/prefix``. No rights needed."""
        found: dict[str, list[str]] = {}
        for step in map(read_step, self.steps()):
            for netdev, addresses in step.addresses.items():
                found.setdefault(netdev, []).extend(addresses)
        return found


@contextlib.contextmanager
def locked(place: Place) -> Iterator[None]:
    """Hold the history for one writer. Raises BusyError, StorageError."""
    with translated("nothing was changed"):
        place.state.mkdir(parents=True, exist_ok=True)
        for folder in (place.state.parent, place.state):
            folder.chmod(0o755)  # whatever the umask: `plan` and `verify` read it without rights
        handle = os.open(place.state, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _sweep(place)
        yield
    except BlockingIOError:
        raise BusyError(
            f"{place.state}: another patchkit is at work", hint="wait until it is done"
        ) from None
    finally:
        os.close(handle)


def begin(place: Place, data: bytes, addresses: Mapping[str, Sequence[str]]) -> Path:
    """Write the file, having noted what was there. ``finish`` or ``take_back`` must follow.

    Returns the folder of the change. Raises StorageError; the file is then as before.
    """
    before = place.text()
    steps = place.steps()
    folder = place.state / str(int(steps[-1].name) + 1 if steps else 1)
    step = Step(
        before=digest(before),
        after=digest(data),
        mode=place.file.stat().st_mode & 0o7777 if before is not None else MODE,
        addresses=addresses,
    )
    with translated("nothing was changed"):
        _check_link(place.file)
        _stage(folder, before, data, step)
    try:
        with translated("nothing was changed"):
            place.file.parent.mkdir(parents=True, exist_ok=True)
            _put(place.file, data, MODE)
    except StorageError:
        take_back(place, folder)
        forget(folder)
        _sweep(place)
        raise
    return folder


def finish(folder: Path) -> None:
    """The network has the change: from now on `undo` is the way back."""
    with translated(f"{folder} has what was there"):
        _put(folder / "done", b"", MODE)


def take_back(place: Place, folder: Path) -> None:
    """Put back what was there before a change; the change stays noted until `forget`.

    Raises DriftError if somebody edited the file since.
    """
    step = read_step(folder)
    found = digest(place.text())
    if found not in (step.before, step.after):
        raise DriftError(
            f"{place.file}: edited since patchkit wrote it",
            why="it is neither what patchkit wrote nor what was there before",
            hint=f"put it aside (sudo mv {place.file} {place.file}.mine), "
            f"sudo cp {folder / 'after'} {place.file}, then run `patchkit net undo` again",
        )
    if found == step.before:
        return
    with translated(f"{folder} has what was there"):
        if step.before:
            _put(place.file, (folder / "before").read_bytes(), step.mode)
        else:
            place.file.unlink()
            sync(place.file.parent)


def forget(folder: Path) -> None:
    """Remove the note of a change that was taken back."""
    gone = folder.with_name(f"{folder.name}.gone")
    with translated(f"{folder} is still noted"):
        folder.rename(gone)
        sync(folder.parent)
        shutil.rmtree(gone)


def last(place: Place) -> Path:
    """The change that undo takes back. Raises UsageError if there is none."""
    steps = place.steps()
    if not steps:
        raise UsageError(
            "there is nothing to undo", why=f"{place.state} has no change of patchkit's"
        )
    return steps[-1]


def check_untouched(place: Place, *, force: bool) -> None:
    """Raise DriftError if the file is not as patchkit left it, unless forced."""
    steps = place.steps()
    known = read_step(steps[-1]).after if steps else ""
    if digest(place.text()) != known and not force:
        raise DriftError(
            f"{place.file}: is not as patchkit left it",
            why="somebody wrote or edited it" if place.text() is not None else "it was removed",
            hint="look at the difference with --dry-run --force; --force replaces it "
            "(`net undo` puts it back)",
        )


def read_step(folder: Path) -> Step:
    """Raises StorageError if the note of a change is damaged."""
    path = folder / "step.json"
    try:
        return Step(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise StorageError(
            f"{path}: is damaged: {error}", hint=f"{folder / 'before'} is what was there"
        ) from None


def digest(data: bytes | None) -> str:
    """sha256, ``""`` for no file."""
    return "" if data is None else hashlib.sha256(data).hexdigest()


def _check_link(path: Path) -> None:
    if path.is_symlink():
        raise DriftError(
            f"{path}: is a symbolic link",
            why="patchkit writes a file there, and would replace the link",
            hint="remove it",
        )


def _sweep(place: Place) -> None:
    """Clear away what killed runs left half made, or half removed."""
    _draft(place.file).unlink(missing_ok=True)
    for each in place.state.iterdir():
        if each.suffix in (".new", ".gone"):
            shutil.rmtree(each)


def _stage(folder: Path, before: bytes | None, after: bytes, step: Step) -> None:
    """The folder of a change, whole or not at all."""
    draft = folder.with_name(f"{folder.name}.new")
    draft.mkdir()
    draft.chmod(0o755)
    if before is not None:
        _put(draft / "before", before, MODE)
    _put(draft / "after", after, MODE)
    _put(draft / "step.json", json.dumps(asdict(step), indent=1).encode(), 0o644)
    draft.rename(folder)
    sync(folder.parent)


def _put(path: Path, data: bytes, mode: int) -> None:
    """A file with these bytes, or as before: written beside it, then renamed."""
    draft = _draft(path)
    draft.unlink(missing_ok=True)
    write_new(draft, data, lambda handle: os.fchmod(handle, mode))
    draft.replace(path)
    sync(path.parent)


def _draft(path: Path) -> Path:
    """The name in between, which netplan does not read, since it ends in ``.new``."""
    return path.with_name(f".{path.name}.new")
