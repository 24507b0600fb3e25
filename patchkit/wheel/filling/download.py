"""Download locked wheels side by side."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import requests

from patchkit.durable.failure import translated
from patchkit.errors import HashMismatchError
from patchkit.source.fetch import CHUNK, copy, opened
from patchkit.source.pip_settings import index_session, pip_settings
from patchkit.wheel.filling.resolve import LockedWheel

_SIDE_BY_SIDE = 4
_PERIOD = 0.2  # seconds between two reports of progress

Progress = Callable[[int, int], None]
"""Takes the bytes that are there and the bytes in all, as far as the index says."""


def download(
    wheels: Sequence[LockedWheel], folder: Path, scratch: Path, progress: Progress
) -> None:
    """Download wheels into a folder; one is there once it is whole and the one that was locked.

    ``scratch`` is another folder of the same file system. Raises HashMismatchError, StorageError;
    the first failure ends the other downloads.
    """
    received = dict.fromkeys(wheels, 0)
    waiting, ended = deque(wheels), threading.Event()
    finished: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            while waiting and not ended.is_set():
                wheel = waiting.popleft()
                part = scratch / wheel.name.filename
                _save(wheel, part, session, ended, received)
                # Only what is whole gets its name, so the next run can take it as it is.
                part.replace(folder / part.name)
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
                total = sum(max(wheel.size, received[wheel]) for wheel in wheels)
                progress(sum(received.values()), total)
        finally:
            ended.set()


def _save(
    wheel: LockedWheel,
    part: Path,
    session: requests.Session,
    ended: threading.Event,
    received: dict[LockedWheel, int],
) -> None:
    def count(done: int, _expected: int) -> None:
        received[wheel] = done
        if ended.is_set():
            raise InterruptedError

    with part.open("wb") as file, _chunks(wheel.url, session) as chunks:
        sha256, _size = copy(chunks, file, wheel.size or sys.maxsize, count)  # 0: unknown
    if sha256 != wheel.sha256:
        raise HashMismatchError(
            f"the download of {wheel.name.filename} is not the file that was locked",
            why=f"its sha256 is {sha256}; the index said {wheel.sha256}",
            hint="run it again; if it stays so, the index or a proxy changes files",
        )


@contextlib.contextmanager
def _chunks(url: str, session: requests.Session) -> Iterator[Iterable[bytes]]:
    if urlsplit(url).scheme == "file":
        with Path(unquote(urlsplit(url).path)).open("rb") as file:
            yield iter(lambda: file.read(CHUNK), b"")
    else:
        with opened(url, session) as response:
            yield response.iter_content(CHUNK)
