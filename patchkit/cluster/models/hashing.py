"""Hash the files of a model in parallel, each with the algorithm that the Hub uses for it."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from patchkit.cluster.models.model_files import ModelFile
from patchkit.cluster.ssh.answer import Steps
from patchkit.finding import Finding

HASH = "hash"
"""``about`` of the finding that the bytes of a file differ from those on the Hub."""

_SIDE_BY_SIDE = 8  # files at a time; with more, they only wait for the disk
_SHA1 = 40  # hex digits
_BLOCK = 1 << 20


def hash_findings(
    place: Path,
    files: Mapping[str, ModelFile],
) -> Steps[list[Finding]]:
    """Return a finding for each file that cannot be read or whose digest is not the given one.

    Files are hashed in parallel. Yields the progress: bytes done, and bytes in all. A caller may
    close the generator early: then nothing waits for the files that are being read.
    """
    done = 0
    total = sum(file.size for file in files.values())
    findings: list[Finding] = []

    over = threading.Event()
    pool = ThreadPoolExecutor(min(_SIDE_BY_SIDE, os.cpu_count() or 1))
    try:
        hashes = {
            name: pool.submit(_hash_file, place / name, file.digest, over)
            for name, file in files.items()
        }

        for name, file in files.items():
            findings += _judge_hash(name, file.digest, hashes[name])
            done += file.size
            yield done, total
    finally:
        over.set()
        pool.shutdown(wait=False, cancel_futures=True)
    return findings


def _judge_hash(name: str, right: str, hashing: Future[str]) -> Iterator[Finding]:
    """Yield a finding if a file could not be read, or has another digest than the ``right`` one."""
    try:
        digest = hashing.result()
    except OSError as error:
        yield Finding(
            where=name,
            what=f"cannot be read: {error.strerror or error}",
            why="whether its bytes are right is not known",
        )
        return

    if digest != right:
        yield Finding(
            about=HASH,
            where=name,
            what=f"has the hash {digest[:16]}…, not {right[:16]}…",
            why="its bytes are not those of the Hub",
        )


def _hash_file(path: Path, like: str, over: threading.Event) -> str:
    """Return the sha256 of a file, or git's sha1 of a blob if ``like`` is a sha1. Raises OSError.

    Once ``over`` is set, stop reading and return the digest of the part that was read.
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
