"""Download locked wheels side by side."""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

import requests

from patchkit.durable.failure import translated
from patchkit.durable.partial import continuing
from patchkit.errors import HashMismatchError
from patchkit.source.fetch import CHUNK, opened, transfer
from patchkit.source.pip_settings import index_session, pip_settings
from patchkit.wheel.wheelhouse.resolve import LockedWheel

_SIDE_BY_SIDE = 4
_PERIOD = 0.2  # seconds between two reports of progress

Progress = Callable[[int, int], None]
"""Takes the bytes that are there and the bytes in all, as far as the index says."""


def download_wheels(wheels: Sequence[LockedWheel], folder: Path, progress: Progress) -> None:
    """Download wheels into a folder; one is there once it is whole and the one that was locked.

    What is cut short stays, for the next run to go on with. Raises HashMismatchError, StorageError;
    the first failure ends the other downloads.
    """
    sizes = dict.fromkeys(wheels, 0)
    waiting, ended = deque(wheels), threading.Event()
    finished: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            while waiting and not ended.is_set():
                wheel = waiting.popleft()
                _save_wheel(wheel, folder, session, ended, sizes)
            finished.put(None)
        except Exception as error:  # noqa: BLE001  (raised again, by the thread that waits)
            finished.put(error)

    running = min(_SIDE_BY_SIDE, len(wheels))
    with index_session(pip_settings()) as session, translated(at=folder):
        for _ in range(running):
            # As a daemon: after an interrupt nobody waits for a server that says nothing.
            threading.Thread(target=work, daemon=True).start()
        try:
            while running:
                # Empty after each period, when progress is to be reported.
                with contextlib.suppress(queue.Empty):
                    if error := finished.get(timeout=_PERIOD):
                        raise error
                    running -= 1
                total = sum(max(wheel.size, sizes[wheel]) for wheel in wheels)
                progress(sum(sizes.values()), total)
        finally:
            ended.set()


def _save_wheel(
    wheel: LockedWheel,
    folder: Path,
    session: requests.Session,
    ended: threading.Event,
    sizes: dict[LockedWheel, int],
) -> None:
    def count(done: int, _expected: int) -> None:
        sizes[wheel] = done
        if ended.is_set():
            raise InterruptedError

    # Only what is whole gets its name, so the next run can take it as it is.
    place = folder / wheel.name.filename
    if place.is_symlink():  # nobody but fill puts something there, and fill makes no links
        place.unlink()
    url = urlsplit(wheel.url)
    with continuing(place) as stream:
        if url.scheme == "file":
            stream.truncate(0)
            digest = hashlib.sha256()
            with Path(unquote(url.path)).open("rb") as file:
                for chunk in iter(partial(file.read, CHUNK), b""):
                    digest.update(chunk)
                    count(sizes[wheel] + stream.write(chunk), 0)
            sha256 = digest.hexdigest()
        else:
            ask = partial(opened, wheel.url, session)
            sha256, _size = transfer(stream, ask, wheel.sha256, wheel.size, count)
        if sha256 != wheel.sha256:
            stream.truncate(0)
            raise HashMismatchError(
                f"the download of {wheel.name.filename} is not the file that was locked",
                why=f"its sha256 is {sha256}; the index said {wheel.sha256}",
                hint="run it again; if it stays so, the index or a proxy changes files",
            )
