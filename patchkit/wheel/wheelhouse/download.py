"""Download locked wheels, each going on where an earlier run was cut short."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from patchkit.durable.atomic import continuing
from patchkit.durable.failure import translated
from patchkit.errors import HashMismatchError
from patchkit.source.fetch import CHUNK, opened, transfer
from patchkit.source.pip_settings import index_session, pip_settings
from patchkit.wheel.wheelhouse.resolve import LockedWheel

if TYPE_CHECKING:
    import requests

Progress = Callable[[int, int], None]
"""Takes the bytes that are there and the bytes in all, as far as the index says."""


def download_wheels(wheels: Sequence[LockedWheel], folder: Path, progress: Progress) -> None:
    """Download wheels into a folder; one is there once it is whole and the one that was locked.

    What is cut short stays, for the next run to go on with. Raises HashMismatchError, StorageError.
    """
    before, total = 0, sum(wheel.size for wheel in wheels)

    def report(before: int, now: int, _all: int) -> None:
        progress(before + now, max(total, before + now))

    with index_session(pip_settings()) as session, translated(at=folder):
        for wheel in wheels:
            place = folder / wheel.name.filename
            _save_wheel(wheel, place, session, partial(report, before))
            before += place.stat().st_size


def _save_wheel(
    wheel: LockedWheel, place: Path, session: requests.Session, progress: Progress
) -> None:
    if place.is_symlink():  # nobody but fill puts something there, and fill makes no links
        place.unlink()
    url = urlsplit(wheel.url)
    # Only what is whole gets its name, so the next run can take it as it is.
    with continuing(place) as stream:
        if url.scheme == "file":
            stream.truncate(0)
            digest = hashlib.sha256()
            with Path(unquote(url.path)).open("rb") as file:
                for chunk in iter(partial(file.read, CHUNK), b""):
                    digest.update(chunk)
                    stream.write(chunk)
            sha256 = digest.hexdigest()
        else:
            ask = partial(opened, wheel.url, session)
            sha256, _size = transfer(stream, ask, wheel.sha256, wheel.size, progress)
        if sha256 != wheel.sha256:
            stream.truncate(0)
            raise HashMismatchError(
                f"the download of {wheel.name.filename} is not the file that was locked",
                why=f"its sha256 is {sha256}; the index said {wheel.sha256}",
                hint="run it again; if it stays so, the index or a proxy changes files",
            )
