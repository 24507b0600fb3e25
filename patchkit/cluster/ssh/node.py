"""Call functions of patchkit on other machines, one or several at once, as if they were here."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar, cast

from patchkit.cluster.ssh.answer import (
    COMMAND,
    HEARTBEAT,
    MARK,
    encoded,
    file_error,
    first_bytes,
    hand_over,
)
from patchkit.cluster.ssh.ssh import HERE, sent_error, ssh_command, ssh_error, ssh_words
from patchkit.errors import HostError, PatchkitError, UsageError
from patchkit.follow import FOLLOWED, Follow, FollowLimits
from patchkit.foreign import read_json
from patchkit.frozen import Fields, Texts, positional
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
