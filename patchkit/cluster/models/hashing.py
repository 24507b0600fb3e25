"""Hash files side by side: sha256, or git's sha1 of a blob; the length says which it has to be."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

_PERIOD = 0.5  # seconds from one report to the next
_SIDE_BY_SIDE = 8  # more wait for the disk
_SHA1 = 40  # hex digits


class _CountedFile(io.FileIO):
    """A file that counts what is read of it, and can be stopped."""

    def __init__(self, path: Path, counts: list[int]) -> None:
        super().__init__(path)
        self.counts = counts

    def readinto(self, buffer: Any) -> int:
        if self.counts[1]:
            raise InterruptedError("the check was interrupted")
        count = super().readinto(buffer) or 0
        self.counts[0] += count  # off by a little if two threads meet, and for show alone
        return count


def hash_files(wanted: Mapping[Path, str]) -> Generator[int, None, dict[Path, str]]:
    """Yield how many bytes are read; return each file's digest, of the kind that is wanted.

    A file that cannot be read has the system's words in place of its digest.
    """
    counts = [0, 0]  # bytes read, and whether to stop
    with ThreadPoolExecutor(min(_SIDE_BY_SIDE, os.cpu_count() or 1)) as pool:
        running = {
            path: pool.submit(_hash_file, path, digest, counts) for path, digest in wanted.items()
        }
        try:
            while wait(running.values(), _PERIOD).not_done:
                yield counts[0]
        finally:
            counts[1] = 1
            for future in running.values():
                future.cancel()
    yield counts[0]
    return {path: future.result() for path, future in running.items()}


def _hash_file(path: Path, like: str, counts: list[int]) -> str:
    try:
        with _CountedFile(path, counts) as file:
            if len(like) != _SHA1:
                return hashlib.file_digest(file, "sha256").hexdigest()
            head = f"blob {os.fstat(file.fileno()).st_size}\0".encode()
            begun = hashlib.sha1(head, usedforsecurity=False)
            return hashlib.file_digest(file, lambda: begun).hexdigest()
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
