"""Copy with rsync from this node to another: resumable, with progress, and the speed measured."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import HostError, StorageError, UsageError
from patchkit.follow import Follow, ending
from patchkit.quoting import quoted

_SILENCE = 300  # seconds without a byte: a login that hangs, for one
INSTALL = ("sudo", "apt", "install", "rsync")
_PROGRESS = re.compile(r"\s*(\d+)\s+\d+%\s")  # bytes, of --info=progress2
_SENT = re.compile(r"^Literal data: (\d+) bytes", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Copied:
    """The bytes that went over the link, and the seconds that it took."""

    sent: int
    seconds: float


Copying = Generator[tuple[int, int], None, Copied]
"""Yields the progress in bytes, and how many there are."""


def require_rsync() -> None:
    """Raise HostError if this node has none."""
    if not shutil.which("rsync"):
        raise HostError(
            "rsync is not installed",
            why="files are copied with it",
            hint=quoted(*INSTALL),
        )


def copy_files(
    options: Sequence[str],
    sources: Sequence[str | Path],
    total: int,
    ssh: Sequence[str],
    destination: str,
    target: str,
) -> Copying:
    """Copy from here into a folder; ``ssh`` are words up to the destination, "" is this machine.

    Raises UsageError for what rsync would take for something else than a host, HostError or
    StorageError as rsync fails.
    """
    if ":" in destination or "/" in destination or any(" " in word for word in ssh):
        raise UsageError(
            f"{destination!r} is not a host", hint="write it as for ssh: user@host"
        )
    require_rsync()
    words = (
        *("rsync", *options, "--partial", "--protect-args", f"--timeout={_SILENCE}"),
        *("--info=progress2", "--stats", "--no-human-readable", "--outbuf=L"),
        # Plain words without a blank, which rsync splits at.
        *(("-e", " ".join(ssh)) if destination else ()),
        *("--", *sources, f"{destination}:{target}/" if destination else f"{target}/"),
    )
    begun = time.monotonic()
    with Follow(*words, env={**os.environ, "LC_ALL": "C"}) as running:
        for line in running:
            if progress := _PROGRESS.match(line):
                yield min(int(progress[1]), total), total
    done = running.done
    if done.trouble:
        odd = ("rsync error", "%", "rsync: connection unexpectedly closed")
        lines = (line.strip() for line in done.output.split("\n"))
        said = [
            line for line in lines if line and not any(word in line for word in odd)
        ]
        last = (
            said[-1] if said else ending(done.status) if done.status else done.trouble
        )
        what = f"rsync to {destination or 'this machine'} failed: {last}"
        again = "the same command again goes on there"
        if "No space left" in done.output:
            raise StorageError(
                what, why="the disk there is full", hint=f"make room; {again}"
            )
        raise HostError(
            what,
            why="the node that has the files logs in to the others, which need rsync",
            hint=f"try it on that node: `{quoted('ssh', destination, 'rsync -V')}`; {again}",
        )
    sent = _SENT.search(done.output)
    return Copied(int(sent[1]) if sent else 0, round(time.monotonic() - begun, 3))
