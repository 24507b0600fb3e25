"""Wheels on the package index, read where they lie: a list of members, or a METADATA, by ranges."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email.parser import HeaderParser
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from patchkit.errors import StorageError
from patchkit.source.fetch import index_client
from patchkit.source.releases import wheel_cpus

if TYPE_CHECKING:
    from requests import Session

_BLOCK = (
    1 << 18
)  # bytes that are asked for at once; the directory of a wheel is at its end
_TIMEOUT = (20.0, 60.0)  # seconds to connect, seconds without a byte


class _Remote(io.RawIOBase):
    """A file behind a URL, of which only the blocks that are read are fetched."""

    def __init__(self, session: Session, url: str, size: int) -> None:
        self._session, self._url, self._size = session, url, size
        self._at = 0
        self._blocks: dict[int, bytes] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = (
            offset
            + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        )
        return self._at

    def readinto(self, buffer: Any) -> int:
        start = self._at // _BLOCK
        block = self._blocks.get(start) or self._fetched(start)
        data = block[self._at - start * _BLOCK :][: len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _fetched(self, number: int) -> bytes:
        first, last = number * _BLOCK, min((number + 1) * _BLOCK, self._size) - 1
        if first > last:
            return b""
        wanted = {"Range": f"bytes={first}-{last}", "Accept-Encoding": "identity"}
        with self._session.get(
            self._url, headers=wanted, timeout=_TIMEOUT, stream=True
        ) as answer:
            if answer.status_code != 206:  # 206 Partial Content
                raise StorageError(
                    f"{self._url.rpartition('/')[2]}: the package index delivers no part of a file "
                    f"(HTTP status {answer.status_code})",
                    why="it does not know ranges, so a whole wheel would have to be fetched",
                    hint="set PIP_INDEX_URL to an index that does",
                )
            self._blocks[number] = answer.content
        return self._blocks[number]


@contextmanager
def _opened(project: str, version: str, cpu: str) -> Iterator[zipfile.ZipFile]:
    with index_client() as client:
        packages = client.get_project_page(project).packages
        wheels = [
            each
            for each in packages
            if each.package_type == "wheel"
            and each.version is not None
            and Version(each.version) == Version(version)  # 13.0.3 is there as 13.0.3.0
            and (each.filename.endswith("-any.whl") or cpu in wheel_cpus(each.filename))
        ]
        if not wheels:
            raise StorageError(
                f"the package index has no wheel of {project} {version} for {cpu}"
            )
        size = wheels[-1].size or int(
            client.s.head(wheels[-1].url).headers["Content-Length"]
        )
        remote = _Remote(client.s, wheels[-1].url, size)
        # Buffered, since zipfile reads a few bytes at a time.
        with zipfile.ZipFile(io.BufferedReader(remote)) as bundle:
            yield bundle


def members(project: str, version: str, cpu: str) -> list[str]:
    """List what a wheel holds. Raises StorageError if the index fails or knows no ranges."""
    with _opened(project, version, cpu) as bundle:
        return bundle.namelist()


def requirements(project: str, version: str, cpu: str) -> list[str]:
    """Return the Requires-Dist of a wheel. Raises as ``members`` does."""
    with _opened(project, version, cpu) as bundle:
        (path,) = (
            each for each in bundle.namelist() if each.endswith(".dist-info/METADATA")
        )
        headers = HeaderParser().parsestr(bundle.read(path).decode())
    return list(headers.get_all("Requires-Dist", []))
