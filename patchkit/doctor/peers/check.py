"""Make a check that always answers: what is wrong, that all is well, or why it was not made.

The texts are data, in recipes/doctor: a check names one by its id, and has the fields of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any, TypeVar

from patchkit.cluster.ssh.ssh import there
from patchkit.errors import PatchkitError
from patchkit.finding import Finding, Level, finding_from_text, finding_texts

_FILES = ("peers.toml", "machine.toml", "nccl.toml", "server.toml", "gpu.toml")

_Value = TypeVar("_Value")
Outcome = Finding | Sequence[Finding] | Mapping[str, object]
"""State what a check returns: findings, or the fields of the text that says that all is well."""


class NotCheckedError(PatchkitError):
    """The reason why a check could not be made, and what would let it be made."""


def require(value: _Value | None, why: str) -> _Value:
    """Return a value that a check needs. Raises NotCheckedError for None."""
    if value is None:
        raise NotCheckedError(why)
    return value


@cache
def _file_of_texts() -> Mapping[str, str]:
    return {about: file for file in _FILES for about in finding_texts(file)}


def make_finding(about: str, where: str, **fields: object) -> Finding:
    """Return the finding of this id; its command is made there, if it names the words of one."""
    file = _file_of_texts()[about]
    if run := finding_texts(file)[about].run:
        fields = {"command": there(where, *(word.format_map(fields) for word in run)), **fields}
    return finding_from_text(file, about, where, **fields)


def make_fine(about: str, where: str, **fields: object) -> Finding:
    """Return that a check found nothing wrong, with what was seen."""
    text = finding_texts(_file_of_texts()[about])[about]
    return Finding(
        level=Level.OK,
        where=where,
        about=about,
        what=text.fine.format_map(fields),
        source=text.source.format_map(fields),
    )


def unchecked(about: str, where: str, reason: str, hint: str = "") -> Finding:
    """Return that it was not looked at, with the reason."""
    what = f"not checked: {reason}"
    return Finding(level=Level.UNKNOWN, where=where, about=about, what=what, hint=hint)


def check(*names: str) -> Callable[[Callable[..., Outcome]], Callable[..., list[Finding]]]:
    """Make a function a check of these names, which returns findings whatever happens.

    Its first argument has the ``node`` that is checked. Where it raises NotCheckedError each of the
    names is unknown. Where it returns fields, the first name is fine.
    """

    def decorate(function: Callable[..., Outcome]) -> Callable[..., list[Finding]]:
        @wraps(function)
        def run(checked: Any, *args: Any) -> list[Finding]:
            try:
                outcome = function(checked, *args)
            except NotCheckedError as error:
                return [unchecked(name, checked.node, error.what, error.hint) for name in names]
            if isinstance(outcome, Mapping):
                return [make_fine(names[0], checked.node, **outcome)]
            return [outcome] if isinstance(outcome, Finding) else list(outcome)

        return run

    return decorate
