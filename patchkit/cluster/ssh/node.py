"""Call functions of patchkit on other machines, one or several at once, as if they were here.

Copy files between machines with rsync, resumably, with progress and a measured time.
"""

import contextlib
import inspect
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from patchkit.cluster.ssh.answer import (
    COMMAND,
    HEARTBEAT,
    MARK,
    Steps,
    encoded,
    file_error,
    first_bytes,
    hand_over,
)
from patchkit.cluster.ssh.ssh import (
    HERE,
    TOOL_WORDS,
    sent_error,
    ssh_command,
    ssh_error,
    ssh_words,
)
from patchkit.errors import HostError, PatchkitError, StorageError, UsageError
from patchkit.follow import FOLLOWED, Completed, Follow, FollowLimits, ending
from patchkit.foreign import read_json
from patchkit.frozen import Fields, Texts, positional
from patchkit.quoting import quoted
from patchkit.records import RecordError, record

T = TypeVar("T")
_READY = 300.0  # seconds
_NO_JSON = "an answer that is no JSON"
_CUT_SHORT = "the answer was cut short"
_LIMITS = FollowLimits(mark=MARK, silence=30, line=16 << 20, size=256 << 20)
# A call that takes more seconds, or returns more bytes, is a stream.
_CALL_SECONDS = 600.0
_CALL_SIZE = 64 << 20


@positional
class Remote:
    """A machine that ssh reaches; ``localhost`` is this machine, without ssh.

    ``way`` are the words of another program to use instead of ssh, such as those that enter a
    container.

    The methods call functions on the machine, from modules that need only the standard library.
    Arguments and results are values of JSON; a result is checked to be of the type ``kind``. An
    error of patchkit on the machine is raised here, with the destination before its text. HostError
    is raised if ssh or Python fails there, if the machine is silent, or if its answer has another
    type.
    """

    destination: str
    way: Texts = ()

    @property
    def here(self) -> bool:
        return self.destination == HERE

    def call(self, kind: type[T], function: Callable[..., Any], **arguments: Any) -> T:
        """Return the result of a function on the machine, within ten minutes and 64 MiB."""
        limits = replace(_LIMITS, seconds=_CALL_SECONDS, size=_CALL_SIZE)
        parts = self._ask(function, arguments, limits)
        return self._finish(kind, parts, lambda _part: None)

    def stream(
        self, kind: type[T], function: Callable[..., Iterator[Any]], **arguments: Any
    ) -> Generator[T, None, None]:
        """Yield the parts of a generator on the machine as they come.

        Closing this generator ends the one on the machine.
        """
        with contextlib.closing(self._ask(function, arguments, _LIMITS)) as parts:
            for part in parts:
                yield self.checked(kind, part)

    def follow(
        self,
        kind: type[T],
        progress: Callable[[int, int], None],
        function: Callable[..., Any],
        **arguments: Any,
    ) -> T:
        """Return the result of a generator on the machine, without a time limit.

        ``progress`` is called with each part that it yields: ``(DONE, TOTAL)``.
        """

        def report(part: object) -> None:
            progress(*self.checked(tuple[int, int], part))

        return self._finish(kind, self._ask(function, arguments, _LIMITS), report)

    @contextlib.contextmanager
    def opened(
        self, kind: type[T], function: Callable[..., Iterator[Any]], **arguments: Any
    ) -> Iterator[T]:
        """Yield the first part of a generator on the machine; it runs until the block ends."""
        with contextlib.closing(self.stream(kind, function, **arguments)) as parts:
            for part in parts:
                yield part
                return
        raise self._silence(_CUT_SHORT)

    def _finish(
        self,
        kind: type[T],
        parts: Generator[Any, None, Any],
        take: Callable[[Any], None],
    ) -> T:
        with contextlib.closing(parts):
            return self.checked(kind, hand_over(parts, take))

    def _ask(
        self,
        function: Callable[..., Any],
        arguments: Fields,
        limits: FollowLimits,
    ) -> Generator[Any, None, Any]:
        """Yield the parts of a function's generator on the machine; return the result."""
        if self.here:
            try:
                # In this process, with values that went through JSON as those of a node do.
                value = function(**self._decoded(encoded(arguments)))
                is_stream = inspect.isgenerator(value)
                return (yield from value) if is_stream else value
            except OSError as error:
                raise file_error(error) from error

        given = first_bytes(function.__module__, function.__qualname__, arguments)
        words = self.way
        if words:
            # A container may first have to load its image.
            limits = replace(limits, silence=_READY)
        else:
            words = ssh_words(self.destination)

        # `with` closes the connection even if the caller keeps an error and its traceback.
        with Follow(
            *words, COMMAND, given=[given], beat=HEARTBEAT, limits=limits
        ) as talk:
            for line in talk:
                match self._read_line(line):
                    case ("error", fields):
                        raise sent_error(fields, self.destination)
                    case ("value", value):
                        return value
                    case ("part", part):
                        yield part

        if talk.done.trouble:
            raise ssh_error(talk.done, self.destination)
        raise self._silence(_CUT_SHORT)

    def _read_line(self, line: str) -> tuple[str, Any]:
        """Return the kind of a line (``error``, ``value``, ``part``, ``alive``) and its content."""
        try:
            ((kind, content),) = self._decoded(line).items()
        except (ValueError, AttributeError):
            raise self._silence(_NO_JSON) from None
        return kind, content

    def _decoded(self, text: str) -> Any:
        """Return the value of a text in JSON. Raises HostError if it is not JSON."""
        try:
            return read_json(text)
        except ValueError:
            raise self._silence(_NO_JSON) from None

    def checked(self, kind: type[T], value: object) -> T:
        """Return an answer of this machine as a ``kind``. Raises HostError if it does not fit."""
        if self.here:
            value = self._decoded(encoded(value))
        try:
            return record(kind, value)
        except RecordError as error:
            raise self._silence(f"an answer that does not fit: {error}") from None

    def _silence(self, problem: str) -> HostError:
        look = ssh_command(self.destination, "python3", "-V")
        return HostError(f"{self.destination}: {problem}", hint=look)


def check_peer(source: Remote, destination: str) -> None:
    """Raise UsageError if another node is to reach this machine as ``localhost``, its own name."""
    if destination == HERE and not source.here:
        raise UsageError(
            f"{source.destination} does not reach this machine by the name {HERE}",
            hint='give it another name in cluster.toml: peer = "user@host"',
        )


R = TypeVar("R")


def run_on_all(
    nodes: Sequence[Any], work: Callable[..., R], *more: Iterable[Any]
) -> list[R | PatchkitError]:
    """Return for each node the result of ``work``, or the error that it raised, in their order.

    ``work`` gets the node, and the node's element of each sequence in ``more``.
    An interrupt ends the programs on the nodes, and is raised.
    """
    results: list[R | PatchkitError] = []
    with ThreadPoolExecutor(max_workers=max(len(nodes), 1)) as pool:
        for future in [
            pool.submit(work, *row) for row in zip(nodes, *more, strict=True)
        ]:
            try:
                results.append(future.result())
            except PatchkitError as error:
                results.append(error)
            except BaseException:
                for process in list(FOLLOWED):
                    process.terminate()
                raise
    return results


def require_all(results: Sequence[R | PatchkitError]) -> list[R]:
    """Return the results if there is no error. Raises the first error, which names the others."""
    errors = [result for result in results if isinstance(result, PatchkitError)]
    if not errors:
        return cast("list[R]", list(results))

    error = errors[0]
    texts = dict.fromkeys(error.what for error in errors)
    error.what = "\nand ".join(texts)
    raise error


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
