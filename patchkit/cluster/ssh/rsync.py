"""Copy files with rsync from this node to another, resumably, with progress and a measured time."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from patchkit.cluster.ssh.answer import Steps
from patchkit.cluster.ssh.node import Remote, check_peer
from patchkit.cluster.ssh.ssh import HERE, TOOL_WORDS, ssh_command, ssh_words
from patchkit.errors import HostError, PatchkitError, StorageError, UsageError
from patchkit.follow import Completed, Follow, ending
from patchkit.frozen import positional
from patchkit.quoting import quoted

INSTALL = ("sudo", "apt", "install", "rsync")
_PROGRESS = re.compile(r"\s*(\d+)\s+\d+%\s")  # bytes, of --info=progress2
# Lines that name no cause: rsync's summary of an error, its progress, and its statistics.
_NO_CAUSE = re.compile(
    r"rsync error|.*%|rsync: connection unexpectedly closed"
    r"|(?:Number of|Total|Literal|Matched|File list|sent|total size) "
)
_SENT = re.compile(r"^Literal data: (\d+) bytes", re.MULTILINE)


@positional
class Copied:
    """The bytes that were sent, without those that were there already, and the seconds it took."""

    sent: int
    seconds: float


Progress = Callable[[int, int], None]


def require_rsync() -> None:
    """Raise HostError if rsync is not installed on this node."""
    if not shutil.which("rsync"):
        raise HostError(
            "rsync is not installed",
            why="files are copied with it",
            hint=quoted(*INSTALL),
        )


def send_files(
    source: Remote,
    folder: str,
    names: Sequence[str],
    destination: str,
    target: str,
    progress: Progress,
) -> Copied:
    """Send files from the node ``source`` to another node, as ``copy_files`` does.

    ``destination`` is the SSH destination of the other node, as the source knows it.
    """
    check_peer(source, destination)
    return source.follow(
        Copied,
        progress,
        copy_files,
        folder=folder,
        names=list(names),
        destination=destination,
        target=target,
    )


def copy_files(
    folder: str,
    names: Sequence[str],
    destination: str,
    target: str,
) -> Steps[Copied]:
    """Copy files below ``folder``, here, into the folder ``target`` on ``destination``.

    Yields the bytes copied, and the bytes of all files. Raises UsageError for a destination that
    rsync would not read as a host, HostError if rsync is missing or fails, StorageError if the disk
    there is full.
    """
    if ":" in destination or "/" in destination:
        raise UsageError(
            f"{destination!r} is not a host", hint="write it as for ssh: user@host"
        )

    require_rsync()
    total = sum(Path(folder, name).stat().st_size for name in names)
    command = ["rsync", *TOOL_WORDS["rsync"]]
    place = f"{target}/"
    if destination != HERE:
        *ssh, _dashes, _destination = ssh_words(destination, "-o", "ControlMaster=no")
        # rsync splits this text at blanks; the words have none.
        command += ["-e", " ".join(ssh)]
        place = f"{destination}:{place}"
    command += ["--", *[f"{folder}/./{name}" for name in names], place]

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
    """Return the error of a failed rsync, with the last line that names a cause."""
    message = f"rsync to {destination} failed: {_last_line(done)}"
    again = "the same command again goes on there"
    if "No space left" in done.output:
        hint = f"make room; {again}"
        return StorageError(message, why="the disk there is full", hint=hint)

    trial = ssh_command(destination, "rsync", "-V")
    return HostError(
        message,
        why="the node that has the files logs in to the others, which need rsync",
        hint=f"try it on that node: `{trial}`; {again}",
    )


def _last_line(done: Completed) -> str:
    """Return the last line of rsync's output that names a cause, else how rsync ended."""
    # An error may follow the progress in its line.
    for line in reversed(re.split("\n|(?=rsync: )", done.output)):
        text = line.strip()
        if text and not _NO_CAUSE.match(text):
            return text
    return ending(done.status) if done.status else done.trouble
