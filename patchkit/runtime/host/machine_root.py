"""Read the files of a machine below a root, and the answers of tools; or read a recording of both.

A missing fact is no error: it becomes an empty value and, if it matters, a note. A root other than
/ is a recording: the files that a probe read, in the layout of /, with relative links so that tar
can carry them. In a recording commands/ has the answers of tools, and notes.txt the facts that
could not be read, with the reasons.
"""

import errno
import os
import posixpath
import re
import stat
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from patchkit.errors import SourceError, UsageError
from patchkit.frozen import Texts, Values

LIVE = Path("/")
# Bytes of a file: /proc/cpuinfo of the largest machines has two million.
_MOST = 1 << 22
_CHUNK = 1 << 14  # /proc/sys allocates the size of a read, and refuses megabytes
_UNKNOWN = (0xFFFF, 0xFFFFFFFF)  # -1 as 16 and as 32 bits
_PCI = re.compile(r"[0-9a-fA-F]+:[0-9a-fA-F]+:[0-9a-fA-F]+\.[0-9a-fA-F]+")
_MISSING = (errno.ENOENT, errno.ENOTDIR)
# Errors by which sysfs says "none": the speed of a link that is down, an empty GID, a gone device.
_NONE = (*_MISSING, errno.EINVAL, errno.ENODEV, errno.EOPNOTSUPP)


class ToolUnavailable(Exception):  # noqa: N818 (no error: the machine has no such tool, and others do)
    """A tool gives no answer; the text is the reason."""


class RecordingWriter:
    """A recording in ``folder`` of everything that a Reader reads below ``root``.

    Raises UsageError for a folder that is not empty.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        is_empty = folder.is_dir() and not any(folder.iterdir())
        if folder.exists() and not is_empty:
            what = f"{folder}: is there, and not empty"
            raise UsageError(what, hint="name a new folder")

        self.root = Path(os.path.realpath(root))
        self.home = folder
        self.files = 0

    def add_file(self, path: str, data: bytes) -> None:
        """Add a file that was read, with its content."""
        place = self._place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        self.files += not place.exists()
        place.write_bytes(data)

    def add_folder(self, path: str, names: Iterable[str]) -> None:
        """Add a folder and the folders in it; a file is added when it is read."""
        self._place(path).mkdir(parents=True, exist_ok=True)
        for name in names:
            folder = f"{path}/{name}"
            if (self.root / folder).is_dir():
                self._place(folder).mkdir(parents=True, exist_ok=True)

    def finish(self, notes: Iterable[str]) -> None:
        """Write ``notes.txt``, with what could not be read."""
        self.home.mkdir(parents=True, exist_ok=True)
        lines = "".join(f"{note}\n" for note in notes)
        (self.home / "notes.txt").write_text(lines, encoding="utf-8")

    def _place(self, path: str) -> Path:
        """Return where a path lies in the recording; make the links that lead to it."""
        folder = "/"
        for part in path.split("/"):
            step = posixpath.join(folder, part)
            try:
                target = str((self.root / step.lstrip("/")).readlink())
            except OSError:
                folder = step
                continue

            # Absolute or not, a link becomes a relative one within the recording.
            place = posixpath.normpath(posixpath.join(folder, target))
            link = self.home / step.lstrip("/")
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(posixpath.relpath(place, folder))
            folder = place

        return self.home / folder.lstrip("/")


class Reader:
    """A reader of paths relative to a root, such as ``sys/class/net``; ``notes`` name failures.

    Raises SourceError for a root without sys/ and proc/.
    """

    def __init__(self, root: Path, copy: RecordingWriter | None = None) -> None:
        # Resolved, since _place compares links with it.
        self.root = Path(os.path.realpath(root))
        self.live = self.root == LIVE
        self.copy = copy
        self.notes: list[str] = []

        folders = (self.root / "sys", self.root / "proc")
        if not any(map(Path.is_dir, folders)):
            raise SourceError(
                f"{root}: is not a machine root: no sys/ or proc/ directory",
                hint="name / or a folder that `patchkit probe --save` wrote",
            )

    def text(self, path: str, *, needed: bool = False) -> str:
        """Return the text of a file, "" if it cannot be read.

        A failure is noted, but a missing file only if ``needed``.
        """
        try:
            data = self._data(path)
        except OSError as error:
            self._note_failure(path, error, needed=needed)
            return ""

        if self.copy:
            self.copy.add_file(path, data)
        return data.decode(errors="replace")

    def line(self, path: str, *, needed: bool = False) -> str:
        """Return the value that a file of one line holds."""
        return printable(self.text(path, needed=needed))

    def number(self, path: str, *, needed: bool = False) -> int | None:
        """Return the number above 0 in a file, else None. Text that is no number is noted."""
        text = self.line(path, needed=needed)
        number = parse_whole(text)
        if text and number is None:
            self.notes.append(f"/{path}: {text[:40]!r} is not a number")

        # -1, signed or not: the driver does not know.
        is_known = number and number > 0 and number not in _UNKNOWN
        return number if is_known else None

    def settings(self, path: str) -> Values:
        """Return the lines ``NAME=value`` of a file, without quotes around values."""
        values = {}
        for line in self.text(path).splitlines():
            name, sign, value = line.partition("=")
            if sign:
                values[name] = printable(value).strip("\"'")
        return values

    def names(self, path: str, *, needed: bool = False) -> Texts:
        """Return the names in a folder, sorted; none if it cannot be read."""
        try:
            entries = list(self._place(path).iterdir())
        except OSError as error:
            self._note_failure(path, error, needed=needed)
            return ()

        names = sorted(entry.name for entry in entries)
        if self.copy:
            self.copy.add_folder(path, names)
        return tuple(filter(str.isprintable, names))

    def folders(self, path: str, *, needed: bool = False) -> Texts:
        """Return the names of folders in a folder, and of links to folders."""
        folder = self.root / path
        names = self.names(path, needed=needed)
        return tuple(name for name in names if (folder / name).is_dir())

    def real(self, path: str) -> str:
        """Return a path with its links followed, even if it leads to nothing."""
        real = os.path.realpath(self.root / path)
        return os.path.relpath(real, self.root)

    def device(self, path: str) -> tuple[str, str]:
        """Return the PCI address and the driver of a device, "" for none.

        A device without a PCI address has that of its controller.
        """
        fields = self.settings(f"{path}/uevent")
        parts = self.real(path).split("/")
        controllers = filter(_PCI.fullmatch, reversed(parts))
        pci = fields.get("PCI_SLOT_NAME", next(controllers, ""))
        return pci, fields.get("DRIVER", "")

    def answer(self, name: str, ask: Callable[[], str]) -> str:
        """Return the answer of a tool: of ``ask`` on a live machine, else the recorded answer.

        Raises ToolUnavailable.
        """
        path = f"commands/{name}"
        try:
            text = ask() if self.live else self._data(path).decode(errors="replace")
        except (ToolUnavailable, OSError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if getattr(error, "errno", None) in _MISSING:
                reason = f"/{path}: not in this recording"
            raise ToolUnavailable(reason) from None

        if self.copy:
            self.copy.add_file(path, text.encode())
        return text

    def _data(self, path: str) -> bytes:
        place = self._place(path)
        # A pipe in a recording would wait for a writer for ever.
        if not stat.S_ISREG(place.stat().st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")

        with place.open("rb", buffering=0) as file:
            chunks = iter(lambda: file.read(_CHUNK), b"")
            return b"".join(islice(chunks, _MOST // _CHUNK))

    def _place(self, path: str) -> Path:
        """Return where a path lies.

        Raises OSError if it leads out of the recording.
        """
        place = self.root / path
        if not self.live:
            real = Path(os.path.realpath(place))
            if not real.is_relative_to(self.root):
                raise OSError(errno.EXDEV, "leads out of the recording")
        return place

    def _note_failure(self, path: str, error: OSError, *, needed: bool) -> None:
        if not needed and error.errno in _NONE:
            return

        is_missing = error.errno in _MISSING
        reason = error.strerror or type(error).__name__
        note = f"/{path}: {'is not there' if is_missing else reason}"
        if note not in self.notes:
            self.notes.append(note)


def parse_whole(text: str) -> int | None:
    """Return a text of less than 20 characters as a whole number, None for other text."""
    is_number = text.removeprefix("-").isdecimal()
    return int(text) if is_number and len(text) < 20 else None


def printable(text: str) -> str:
    """Return a text as one line, with blanks for characters that a terminal would obey."""
    letters = text.strip().strip("\0")
    shown = (letter if letter.isprintable() else " " for letter in letters)
    return "".join(shown).strip()
