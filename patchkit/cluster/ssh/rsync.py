"""Copy with rsync from this node to another: resumable, with progress, and the speed measured."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import HostError, PatchkitError, StorageError, UsageError
from patchkit.follow import Completed, Follow, ending
from patchkit.quoting import quoted

_SILENCE = 300  # seconds without a byte: a login that hangs, for one
INSTALL = ("sudo", "apt", "install", "rsync")
_PROGRESS = re.compile(r"\s*(\d+)\s+\d+%\s")  # bytes, of --info=progress2
# Marks of lines that name no cause: rsync's last words, and its progress.
_NO_CAUSE = ("rsync error", "%", "rsync: connection unexpectedly closed")
_OPTIONS = (
    "--partial",
    "--protect-args",
    f"--timeout={_SILENCE}",
    "--info=progress2",
    "--stats",
    "--no-human-readable",
    "--outbuf=L",
)
_SENT = re.compile(r"^Literal data: (\d+) bytes", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Copied:
    """The bytes that went over the link, and the seconds that the copy took."""

    sent: int
    seconds: float


Copying = Generator[tuple[int, int], None, Copied]
"""Yields the bytes that are copied, and all bytes."""


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
    """Copy from here into a folder of ``destination``, "" for this machine.

    ``ssh`` are the words of the ssh command in front of the destination, ``total`` is the size in
    bytes. Raises UsageError for a destination that rsync would not take for a host, HostError or
    StorageError if rsync fails.
    """
    if ":" in destination or "/" in destination or any(" " in word for word in ssh):
        raise UsageError(
            f"{destination!r} is not a host", hint="write it as for ssh: user@host"
        )

    require_rsync()
    command = ["rsync", *options, *_OPTIONS]
    place = f"{target}/"
    if destination:
        # Plain words without a blank, which rsync splits at.
        command += ["-e", " ".join(ssh)]
        place = f"{destination}:{place}"
    command += ["--", *map(str, sources), place]

    began = time.monotonic()
    with Follow(*command, env={**os.environ, "LC_ALL": "C"}) as running:
        for line in running:
            if progress := _PROGRESS.match(line):
                yield min(int(progress[1]), total), total

    if running.done.trouble:
        raise _copy_error(running.done, destination)

    sent = _SENT.search(running.done.output)
    seconds = round(time.monotonic() - began, 3)
    return Copied(int(sent[1]) if sent else 0, seconds)


def _copy_error(done: Completed, destination: str) -> PatchkitError:
    """Return the error of an rsync that failed, with the last line that says why."""
    message = f"rsync to {destination or 'this machine'} failed: {_last_line(done)}"
    again = "the same command again goes on there"
    if "No space left" in done.output:
        hint = f"make room; {again}"
        return StorageError(message, why="the disk there is full", hint=hint)

    login = quoted("ssh", destination, "rsync -V")
    return HostError(
        message,
        why="the node that has the files logs in to the others, which need rsync",
        hint=f"try it on that node: `{login}`; {again}",
    )


def _last_line(done: Completed) -> str:
    """Return the last line of rsync about a cause, else how it ended."""
    for line in reversed(done.output.split("\n")):
        text = line.strip()
        if text and not any(word in text for word in _NO_CAUSE):
            return text
    return ending(done.status) if done.status else done.trouble
