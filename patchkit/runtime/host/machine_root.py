"""Read a machine: files below a root, with links that stay inside of it, and what tools say.

Nothing here raises for what the machine has or lacks: it becomes an empty value and, where it
matters, a note. A root other than / is a recording: see recording.py.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from patchkit.errors import SourceError
from patchkit.process import attempt
from patchkit.runtime.host.recording import RecordingWriter, recorded_errors

_MOST = 1 << 22  # bytes of a file: /proc/cpuinfo of the largest machines has two million
_CHUNK = 1 << 14  # /proc/sys allocates what a read asks for, and refuses megabytes
_MISSING = (errno.ENOENT, errno.ENOTDIR)
# How sysfs says "none": speed of a link that is down, an empty entry of a GID table, a gone device.
_NONE = (*_MISSING, errno.EINVAL, errno.ENODEV, errno.EOPNOTSUPP)


class ToolUnavailable(Exception):  # noqa: N818 (no error: the machine has no such tool, and others do)
    """No answer of a tool, and why."""


class Reader:
    """Paths are relative to the root: ``sys/class/net``. ``notes`` says what could not be read."""

    def __init__(self, root: Path, copy: RecordingWriter | None = None) -> None:
        self.root = Path(os.path.realpath(root))  # links are compared with it: see _place
        self.live = self.root == Path("/")
        self.copy = copy
        self.notes: list[str] = []
        self._errors = {} if self.live else recorded_errors(self.root)
        if not any((self.root / name).is_dir() for name in ("sys", "proc")):
            raise SourceError(
                f"{root}: is not a machine root: no sys/ or proc/ directory",
                hint="name / or a folder that `patchkit probe --save` wrote",
            )

    def text(self, path: str, *, needed: bool = False) -> str:
        """Return a whole file; "" if it cannot be read."""
        try:
            data = self._data(path)
        except OSError as error:
            self._failed(path, error, needed=needed)
            return ""
        if self.copy:
            self.copy.file(path, data)
        return data.decode(errors="replace")

    def line(self, path: str, *, needed: bool = False) -> str:
        """Return the value that a file of one line holds."""
        return printable(self.text(path, needed=needed))

    def number(self, path: str, *, needed: bool = False) -> int | None:
        """Return the whole number that a file holds; None, and a note, for other text."""
        text = self.line(path, needed=needed)
        found = whole(text)
        if text and found is None:
            self.note(f"/{path}: {text[:40]!r} is not a number")
        return found

    def settings(self, path: str) -> dict[str, str]:
        """Return the lines ``NAME=value`` of a file, without quotes around values."""
        pairs = (line.partition("=") for line in self.text(path).splitlines())
        return {name: printable(value).strip("\"'") for name, sign, value in pairs if sign}

    def names(self, path: str, *, needed: bool = False) -> tuple[str, ...]:
        """Return the names in a folder, sorted; none if it cannot be read."""
        try:
            self._raise_recorded(path)
            found = sorted(each.name for each in self._place(path).iterdir())
        except OSError as error:
            self._failed(path, error, needed=needed)
            return ()
        if self.copy:
            self.copy.folder(path, found)
        return tuple(name for name in found if name.isprintable())

    def folders(self, path: str, *, needed: bool = False) -> tuple[str, ...]:
        """Return the names of folders in a folder, and of links to folders."""
        found = self.names(path, needed=needed)
        return tuple(name for name in found if (self.root / path / name).is_dir())

    def real(self, path: str) -> str:
        """Return a path with its links followed, whether or not something is there."""
        return os.path.relpath(os.path.realpath(self.root / path), self.root)

    def answer(self, name: str, ask: Callable[[], str]) -> str:
        """Return what a tool says, or said when it was recorded. Raises ToolUnavailable."""
        path = f"commands/{name}"
        try:
            said = ask() if self.live else self._recorded(path)
        except ToolUnavailable as silent:
            if self.copy:
                self.copy.error(path, str(silent))
            raise
        if self.copy:
            self.copy.file(path, said.encode())
        return said

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def _recorded(self, path: str) -> str:
        try:
            return self._data(path).decode(errors="replace")
        except OSError as error:
            missing = error.errno in _MISSING
            raise ToolUnavailable(
                f"/{path}: not in this recording" if missing else _error_text(error)
            ) from None

    def _data(self, path: str) -> bytes:
        self._raise_recorded(path)
        # A pipe in a recording would wait for a writer for ever.
        handle = os.open(self._place(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(errno.EINVAL, "is not a regular file")
            chunks = iter(lambda: os.read(handle, _CHUNK), b"")
            return b"".join(islice(chunks, _MOST // _CHUNK))
        finally:
            os.close(handle)

    def _raise_recorded(self, path: str) -> None:
        if words := self._errors.get(path):
            # Any errno that does not mean "none": the words are the recorded ones.
            raise OSError(errno.EIO, words)

    def _place(self, path: str) -> Path:
        """Return where a path lies. OSError for a link that leads out of a recording."""
        place = self.root / path
        if not self.live and not Path(os.path.realpath(place)).is_relative_to(self.root):
            raise OSError(errno.EXDEV, "leads out of the recording")
        return place

    def _failed(self, path: str, error: OSError, *, needed: bool) -> None:
        if not needed and error.errno in _NONE:
            return
        words = _error_text(error)
        self.note(f"/{path}: {words}")
        # What is missing here is missing in the copy as well.
        if self.copy and error.errno not in _MISSING:
            self.copy.error(path, words)


def run(command: Iterable[str], patience: float) -> str:
    """Return what a command prints. Raises ToolUnavailable, also after ``patience`` seconds."""
    # The words of tools, and their decimal points, depend on the locale.
    done = attempt(*command, env={**os.environ, "LC_ALL": "C"}, timeout=patience)
    if done.trouble:
        raise ToolUnavailable(f"{done.command[0]}: {printable(done.trouble)[:200]}")
    return done.output


def device(reader: Reader, path: str) -> tuple[str, str]:
    """Return PCI address and driver of what a ``device`` link leads to; "" where there is none.

    A virtio or USB device has the address of its controller.
    """
    told = reader.settings(f"{path}/uevent")
    above = reader.real(path).split("/")
    # uevent of a virtio or USB device names no PCI address: its controller's is in the path.
    nearest = next((part for part in reversed(above) if is_pci(part)), "")
    return told.get("PCI_SLOT_NAME", nearest), told.get("DRIVER", "")


def is_pci(text: str) -> bool:
    """Return whether this is domain, bus, slot and function: ``0000:01:00.0``."""
    return re.fullmatch(r"[0-9a-fA-F]+:[0-9a-fA-F]+:[0-9a-fA-F]+\.[0-9a-fA-F]+", text) is not None


def whole(text: str) -> int | None:
    """Return a whole number of less than 20 digits, None for other text."""
    return int(text) if text.removeprefix("-").isdecimal() and len(text) < 20 else None


def printable(text: str) -> str:
    """Return one line, without what would move a terminal's cursor."""
    kept = (letter if letter.isprintable() else " " for letter in text.strip().strip("\0"))
    return "".join(kept).strip()


def _error_text(error: OSError) -> str:
    return "is not there" if error.errno in _MISSING else error.strerror or type(error).__name__
