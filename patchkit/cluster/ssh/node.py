"""Call functions of patchkit on other machines, one or several at once, as if they were here."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

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
from patchkit.records import RecordError, record

T = TypeVar("T")
_CALL_SECONDS, _CALL_SIZE = (
    600.0,
    64 << 20,
)  # what takes longer, or is more, is a stream
_READY = 300.0  # seconds
_NO_JSON = "an answer that is no JSON"
_LIMITS = FollowLimits(mark=MARK, silence=30, line=16 << 20, size=256 << 20)


@dataclass(frozen=True, slots=True)
class Remote:
    """A machine that ssh reaches; ``localhost`` is this one, without ssh.

    ``way`` are words in the place of ssh's, behind which a shell's command stands.

    What is called are functions of the package's modules that need the standard library alone;
    arguments and results are what JSON has, and a result is checked to be of the ``kind`` that is
    asked for. An error of patchkit that is raised there is raised here, with the destination before
    its text; HostError if ssh or Python fail there, if the node is silent, or says something else.
    """

    destination: str
    way: tuple[str, ...] = ()

    @property
    def here(self) -> bool:
        return self.destination == HERE

    def call(self, kind: type[T], function: Callable[..., Any], **arguments: Any) -> T:
        """Return what a function returns there, as what it has to be."""
        limits = replace(_LIMITS, seconds=_CALL_SECONDS, size=_CALL_SIZE)
        return self._finish(
            kind, self._ask(function, arguments, limits), lambda _part: None
        )

    def stream(
        self, kind: type[T], function: Callable[..., Iterator[Any]], **arguments: Any
    ) -> Generator[T, None, None]:
        """Yield what a generator yields there, as it comes; it ends there when this one does."""
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
        """Return what a function returns there, however long it takes.

        A generator's parts are its progress, ``(DONE, TOTAL)``, which is handed over.
        """

        def take(part: object) -> None:
            progress(*self.checked(tuple[int, int], part))

        return self._finish(kind, self._ask(function, arguments, _LIMITS), take)

    @contextlib.contextmanager
    def opened(
        self, kind: type[T], function: Callable[..., Iterator[Any]], **arguments: Any
    ) -> Iterator[T]:
        """Yield the first that a generator yields there; it stays until the end of the block."""
        with contextlib.closing(self.stream(kind, function, **arguments)) as parts:
            for first in parts:
                yield first
                return
        raise self._silence("the answer was cut short")

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
        arguments: dict[str, Any],
        limits: FollowLimits,
    ) -> Generator[Any, None, Any]:
        """Yield what a generator yields there; return what the function returns."""
        if self.here:
            try:
                return (yield from self._ask_here(function, arguments))
            except OSError as error:
                raise file_error(error) from error
        given = first_bytes(function.__module__, function.__qualname__, arguments)
        if (
            self.way
        ):  # a container begins when its image lies ready, which may take a while
            limits = replace(limits, silence=_READY)
        words = (*(self.way or ssh_words(self.destination)), COMMAND)
        # Closed in any case: an error that is kept would keep the connection, too.
        with Follow(*words, given=[given], beat=HEARTBEAT, limits=limits) as talk:
            for line in talk:
                try:
                    ((name, value),) = self._decoded(line).items()
                except (ValueError, AttributeError):
                    raise self._silence(_NO_JSON) from None
                if name == "error":
                    raise sent_error(value, self.destination)
                if name == "value":
                    return value
                if name == "part":
                    yield value
        if talk.done.trouble:
            raise ssh_error(talk.done, self.destination)
        raise self._silence("the answer was cut short")

    def _ask_here(
        self, function: Callable[..., Any], arguments: dict[str, Any]
    ) -> Generator[Any, None, Any]:
        """Call a function in this process, through JSON: it gets and gives what a node's would."""
        value = function(**self._decoded(encoded(arguments)))
        if not inspect.isgenerator(value):
            return self._decoded(encoded(value))

        with contextlib.closing(value):
            while True:
                try:
                    part = next(value)
                except StopIteration as end:
                    return self._decoded(encoded(end.value))
                yield self._decoded(encoded(part))

    def _decoded(self, text: str) -> Any:
        """Return what a text in JSON holds. Raises HostError for what is none."""
        try:
            return read_json(text)
        except ValueError:
            raise self._silence(_NO_JSON) from None

    def checked(self, kind: type[T], value: object) -> T:
        """Return what this node said as what it has to be. Raises HostError if it is not."""
        try:
            return record(kind, value)
        except RecordError as error:
            raise self._silence(f"an answer that does not fit: {error}") from None

    def _silence(self, what: str) -> HostError:
        return HostError(
            f"{self.destination}: {what}",
            hint=ssh_command(self.destination, "python3", "-V"),
        )


def check_peer(source: Remote, destination: str) -> None:
    """Raise UsageError if another node is to reach this machine as ``localhost``, its own name."""
    if destination == HERE and not source.here:
        raise UsageError(
            f"{source.destination} does not reach this machine by the name {HERE}",
            hint='give it another name in cluster.toml: peer = "user@host"',
        )


N = TypeVar("N")
R = TypeVar("R")


def run_on_all(nodes: Sequence[N], work: Callable[[N], R]) -> list[R | PatchkitError]:
    """Return for each node what ``work`` returns, or the error that it raised, in their order.

    An interrupt ends what runs on the nodes, and is raised.
    """
    found: list[R | PatchkitError] = []
    with ThreadPoolExecutor(max_workers=max(len(nodes), 1)) as pool:
        for future in [pool.submit(work, node) for node in nodes]:
            try:
                found.append(future.result())
            except PatchkitError as error:
                found.append(error)
            except BaseException:
                for process in list(FOLLOWED):
                    process.terminate()
                raise
    return found


def require_all(results: Sequence[R | PatchkitError]) -> list[R]:
    """Return the results if all are there. Raises the first error; others are named in it."""
    failed = [each for each in results if isinstance(each, PatchkitError)]
    if not failed:
        return [each for each in results if not isinstance(each, PatchkitError)]
    first, *others = failed
    texts = dict.fromkeys(each.what for each in others if each.what != first.what)
    what = "\n".join([first.what, *(f"and {text}" for text in texts)])
    raise type(first)(what, why=first.why, hint=first.hint)
