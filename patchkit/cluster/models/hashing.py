"""Hash the files of a model side by side, each as the Hub does."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from patchkit.cluster.models.model_files import ModelFile
from patchkit.finding import Finding
from patchkit.frozen import frozen

HASH = "hash"
"""Name what findings are ``about`` where a file has other bytes than those of the Hub."""

_SIDE_BY_SIDE = 8  # files; more wait for the disk
_SHA1 = 40  # hex digits
_BLOCK = 1 << 20


@frozen
class FileHashes:
    """The digests of files by their names, and the reasons for those that cannot be read."""

    digests: Mapping[str, str]
    troubles: Mapping[str, str]


def hash_findings(
    place: Path,
    files: Mapping[str, ModelFile],
) -> Generator[tuple[int, int], None, list[Finding]]:
    """Return a finding for each file with other bytes, or unreadable ones; yield the progress."""
    hashes = yield from hash_files(place, files)
    findings = [
        unreadable_finding(name, trouble) for name, trouble in hashes.troubles.items()
    ]

    for name, digest in hashes.digests.items():
        right = files[name].digest
        if digest != right:
            findings.append(
                Finding(
                    about=HASH,
                    where=name,
                    what=f"has the hash {digest[:16]}…, not {right[:16]}…",
                    why="its bytes are not those of the Hub",
                )
            )
    return findings


def unreadable_finding(name: str, trouble: str) -> Finding:
    """Return the finding of a file that the system could not read."""
    return Finding(
        where=name,
        what=f"cannot be read: {trouble}",
        why="whether its bytes are right is not known",
    )


def hash_files(
    place: Path,
    files: Mapping[str, ModelFile],
) -> Generator[tuple[int, int], None, FileHashes]:
    """Hash files side by side, each as its digest is made; yield the progress in bytes.

    Whoever closes it in the middle waits for no file.
    """
    done = 0
    total = sum(file.size for file in files.values())

    digests: dict[str, str] = {}
    troubles: dict[str, str] = {}

    over = threading.Event()
    pool = ThreadPoolExecutor(min(_SIDE_BY_SIDE, os.cpu_count() or 1))
    try:
        hashes = {
            name: pool.submit(_hash_file, place / name, file.digest, over)
            for name, file in files.items()
        }

        for name, file in files.items():
            try:
                digests[name] = hashes[name].result()
            except OSError as error:
                troubles[name] = error.strerror or str(error)
            done += file.size
            yield done, total
    finally:
        over.set()
        pool.shutdown(wait=False, cancel_futures=True)
    return FileHashes(digests=digests, troubles=troubles)


def _hash_file(path: Path, like: str, over: threading.Event) -> str:
    """Return a sha256, or git's sha1 of a blob if ``like`` is one. Raises OSError.

    Once it is ``over``, it stops reading and returns the digest of what it has read.
    """
    block = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        digest = hashlib.sha256()
        if len(like) == _SHA1:
            head = f"blob {os.fstat(file.fileno()).st_size}\0".encode()
            digest = hashlib.sha1(head, usedforsecurity=False)

        while (length := file.readinto(block)) and not over.is_set():
            digest.update(block[:length])
    return digest.hexdigest()
