"""Lock a folder: one writer at a time."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from patchkit.errors import BusyError

_PAUSE = 0.05  # seconds between two looks at the lock


@contextlib.contextmanager
def locked(folder: Path, patience: float = 0.0) -> Iterator[int]:
    """Lock a folder for a block; wait up to ``patience`` seconds while another process has it.

    Yields the file descriptor of the lock. A program that inherits the descriptor also holds the
    lock; the kernel releases it when the last of these processes ends, even if it is killed. Raises
    BusyError if the folder is still locked after the wait.
    """
    # The folder itself is locked: no lock file is left behind.
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + patience
        while True:  # flock has no time limit: it waits for ever or not at all
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise BusyError(
                        f"{folder}: another patchkit is working on this tree",
                        hint="wait until it is done",
                    ) from None
            time.sleep(_PAUSE)

        yield handle
    finally:
        os.close(handle)


def holder(folder: Path) -> int | None:
    """Return the id of the process that has locked a folder; None if no readable process has."""
    status = folder.stat()
    for line in Path("/proc/locks").read_text().splitlines():
        _number, kind, _mode, _access, pid, place, *_range = line.split()
        if kind != "FLOCK" or not place.endswith(f":{status.st_ino}"):
            continue

        for handle in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                if os.path.samestat(handle.stat(), status):
                    return int(pid)
    return None
