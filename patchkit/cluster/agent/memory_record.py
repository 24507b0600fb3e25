"""Keep what the memory guard of a node saw: its last kill, and the memory that was left.

No container may write into the folder. This file is copied to the nodes, beside group.py.
"""

import errno
import json
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from patchkit.foreign import read_count, read_json

STAYS_DOWN = "it stays down: "
"""Begins what becomes of a start that has no next one."""

BOOT = Path("/proc/sys/kernel/random/boot_id")
GROUPS = Path("/sys/fs/cgroup")
_MOST = 4096  # bytes of a file
_MOST_GIB = 1 << 20  # of a node's memory
_LONGEST = 600  # characters of a text
_FIGURES = re.compile(r"(\d{9,11}) (\d{1,9})( ended)?\n")
_TURN = re.compile(r"turn=(-?\d{1,12}),(\d{1,12})\n")


@dataclass(frozen=True, kw_only=True)
class MemoryStop:
    """How the guard ended the rank of the start ``start``, at ``time`` in seconds since 1970.

    ``missing`` are the GiB that were missing; ``after`` says what becomes of the next start.
    """

    start: str
    time: float
    text: str
    missing: float
    after: str = ""


def record_path(name: str, ending: str) -> Path:
    """Return the path of a record of the cluster ``name``: ``ending`` is json, env or a boot."""
    return Path.home() / ".local/share/patchkit/memory" / f"{name}.{ending}"


def read_stop(name: str, start: str) -> MemoryStop | None:
    """Return the guard's last kill of the start ``start`` of a cluster here, None for none."""
    stop = parse_stop(read_record(name, "json"))
    return stop if stop and stop.start == start else None


def parse_stop(text: str) -> MemoryStop | None:
    """Return the kill that a text describes, None for a text of another form."""
    with suppress(ValueError, TypeError, KeyError):
        fields = read_json(text)
        return MemoryStop(
            start=clean_text(fields["start"]),
            time=read_count(fields["time"]),
            text=clean_text(fields["text"]),
            missing=read_count(fields["missing"], _MOST_GIB),
            after=clean_text(fields["after"]),
        )
    return None


def encode_stop(stop: MemoryStop) -> bytes:
    """Return a kill as ``parse_stop`` reads it."""
    return json.dumps(vars(stop)).encode()


def last_figures(name: str, boot: str) -> tuple[int, int, bool] | None:
    """Return the last memory that a guard saw in a boot, None if it saw none.

    That are the time in seconds since 1970, the MiB that were left, and if systemd ended the guard
    then.
    """
    rows = _FIGURES.findall(read_record(name, boot))
    if not rows:
        return None
    moment, left, end = rows[-1]
    return int(moment), int(left), bool(end)


def read_turn(name: str) -> tuple[int, int] | None:
    """Return the turn of a start that loads in this boot, None for none.

    That are the KiB that are left once the rank has its memory, and the end of the turn in seconds
    on the monotonic clock.
    """
    turn = _TURN.match(read_record(name, BOOT.read_text().strip()))
    return (int(turn[1]), int(turn[2])) if turn else None


def has_unified_groups() -> bool:
    """Return whether this machine has control groups of version 2 alone: the guard needs them."""
    return (GROUPS / "cgroup.controllers").exists()


def write_stop(name: str, stop: MemoryStop) -> None:
    """Replace the record of the last kill, if the disk has room; the journal has it as well."""
    with suppress(OSError):
        write_record(name, "json", encode_stop(stop))


def write_record(name: str, ending: str, content: bytes) -> None:
    """Replace the content of a record, in the file that a guard may have open. Raises OSError."""
    descriptor = open_record(name, ending)
    try:
        put_record(descriptor, content)
    finally:
        os.close(descriptor)


def recorded_boots(name: str) -> list[str]:
    """Return the former boots of which there are figures, by the time of the last ones."""
    files = record_path(name, "").parent.glob(f"{name}.*-*")
    with suppress(OSError):  # one was removed just now
        boots = [file.suffix[1:] for file in sorted(files, key=os.path.getmtime)]
        return [boot for boot in boots if boot != BOOT.read_text().strip()]
    return []


def open_record(name: str, ending: str) -> int:
    """Return the descriptor of a record, which is made if it is missing. Raises OSError."""
    path = record_path(name, ending)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return _open_regular(path, os.O_WRONLY | os.O_CREAT)


def _open_regular(path: Path, flags: int) -> int:
    """Return the descriptor of a regular file: a FIFO would block. Raises OSError, as for links."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return descriptor


def put_record(descriptor: int, content: bytes) -> None:
    """Replace the content of an open record, and wait until it is on the disk."""
    os.pwrite(descriptor, content, 0)
    os.ftruncate(descriptor, len(content))
    os.fsync(descriptor)


def read_record(name: str, ending: str) -> str:
    """Return the text of a record, "" if it is missing or no regular file."""
    with suppress(OSError):
        descriptor = _open_regular(record_path(name, ending), os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as file:
            return file.read(_MOST).decode(errors="replace")
    return ""


def clean_text(text: str) -> str:
    """Return a text on one line, without characters that a terminal obeys."""
    return "".join(filter(str.isprintable, text[:_LONGEST]))
