"""Make a check that always answers: what is wrong, that all is well, or why it was not made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from patchkit.finding import (
    Finding,
    FindingText,
    Level,
    finding_from_text,
    finding_texts,
    fine_from_text,
)

_FILE = "peers.toml"

wrong = partial(finding_from_text, _FILE)
fine = partial(fine_from_text, _FILE)

_Given = ParamSpec("_Given")
_Value = TypeVar("_Value")


class Named(Protocol):
    """What is checked: ``node`` is the name that its findings are about."""

    @property
    def node(self) -> str: ...


_Checked = TypeVar("_Checked", bound=Named)


class NotCheckedError(Exception):
    """The reason why a check could not be made, and what would let it be made."""

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(why)
        self.why, self.hint = why, hint


def require(value: _Value | None, why: str) -> _Value:
    """Return a value that a check needs. Raises NotCheckedError for None."""
    if value is None:
        raise NotCheckedError(why)
    return value


def unknown(about: str, where: str, reason: str, hint: str = "") -> Finding:
    """Return that it was not looked at, with the reason."""
    what = f"not checked: {reason}"
    return Finding(level=Level.UNKNOWN, where=where, about=about, what=what, hint=hint)


def check(
    *names: str,
) -> Callable[
    [Callable[Concatenate[_Checked, _Given], Iterator[Finding]]],
    Callable[Concatenate[_Checked, _Given], Iterator[Finding]],
]:
    """Make a function that yields findings a check of these names.

    It may raise NotCheckedError before it has yielded anything: then each of the names is unknown.
    """

    def decorate(
        function: Callable[Concatenate[_Checked, _Given], Iterator[Finding]],
    ) -> Callable[Concatenate[_Checked, _Given], Iterator[Finding]]:
        @wraps(function)
        def run(
            checked: _Checked, /, *args: _Given.args, **given: _Given.kwargs
        ) -> Iterator[Finding]:
            try:
                yield from function(checked, *args, **given)
            except NotCheckedError as error:
                for name in names:
                    yield unknown(name, checked.node, error.why, error.hint)

        return run

    return decorate


def peer_checks() -> Mapping[str, FindingText]:
    """Return the checks between nodes by id, in the order of causes."""
    return finding_texts(_FILE)
