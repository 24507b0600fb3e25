"""Call functions of patchkit on another machine, as if they were here."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from patchkit.errors import HostError
from patchkit.process import dialogue
from patchkit.runtime.remote.bootstrap import COMMAND, MARK, first_bytes
from patchkit.runtime.remote.failure import sent_error
from patchkit.runtime.remote.ssh import HERE, check_destination, sharing, ssh_error, ssh_words


@dataclass(frozen=True, slots=True)
class Remote:
    """A machine that ssh reaches; ``localhost`` is this one, without ssh.

    What is called are functions of the package's modules that need the standard library alone;
    arguments and results are what JSON has. An error of patchkit that is raised there is raised
    here, with the destination before its text; HostError if ssh or Python fail there.
    """

    destination: str

    def __post_init__(self) -> None:
        check_destination(self.destination)

    @property
    def here(self) -> bool:
        return self.destination == HERE

    def call(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Return what a function returns there."""
        if self.here:
            return json.loads(json.dumps(function(**arguments)))
        value = None
        for kind, value in self._answers(function, arguments):
            if kind == "value":
                return value
        raise self._silence("no answer came back")

    def stream(self, function: Callable[..., Iterator[Any]], **arguments: Any) -> Iterator[Any]:
        """Yield what a generator yields there, as it comes; it ends there when this one does."""
        if self.here:
            yield from function(**arguments)
            return
        for kind, value in self._answers(function, arguments):
            if kind == "value":
                return
            yield value
        raise self._silence("the answer was cut short")

    def _answers(
        self, function: Callable[..., Any], arguments: dict[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        given = first_bytes(function.__module__, function.__qualname__, arguments)
        options = sharing(self.destination)
        talk = dialogue(*ssh_words(self.destination, *options), COMMAND, given=given)
        # An error keeps this frame: the program would be ended as late as Python itself.
        with contextlib.closing(talk):
            while True:
                try:
                    line = next(talk)
                except StopIteration as end:
                    if end.value.trouble:
                        raise ssh_error(end.value, self.destination) from None
                    return
                # What a shell's startup file prints comes before, or between.
                if not line.startswith(MARK):
                    continue
                try:
                    ((kind, value),) = json.loads(line.removeprefix(MARK)).items()
                except (ValueError, AttributeError, RecursionError):
                    raise self._silence("an answer that is no JSON") from None
                if kind == "error":
                    raise sent_error(value, self.destination)
                yield kind, value

    def _silence(self, what: str) -> HostError:
        return HostError(
            f"{self.destination}: {what}", hint=f"look there: ssh {self.destination} python3 -V"
        )
