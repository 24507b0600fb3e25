"""Send an error of patchkit from a node, and raise it again where somebody reads it."""

from __future__ import annotations

from dataclasses import dataclass

from patchkit import errors
from patchkit.cluster.ssh.ssh import HERE, there
from patchkit.errors import HostError, PatchkitError
from patchkit.records import RecordError, record

_LONGEST = 2000  # characters of a text
_KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, PatchkitError)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    kind: str
    what: str
    why: str = ""
    hint: str = ""


def error_fields(error: PatchkitError) -> dict[str, str]:
    """Return an error as JSON takes it."""
    kind = type(error).__name__
    return {"kind": kind, "what": error.what, "why": error.why, "hint": error.hint}


def sent_error(fields: object, where: str) -> PatchkitError:
    """Return the error that a node sent; its text begins with the node's name.

    What the node advises is shown as its words: the next step is never a command of a node's, which
    may be another machine than it should be.
    """
    look = there(where, "python3", "-V")
    try:
        sent = record(_Sent, fields)
    except RecordError as error:
        return HostError(f"{where}: an answer that does not fit: {error}", hint=look)
    kind = _KINDS.get(sent.kind, HostError)
    if where == HERE:
        return kind(f"{where}: {sent.what}", why=sent.why, hint=sent.hint)
    advised = f"it advises: {_join_lines(sent.hint)}" if sent.hint else ""
    why = "; ".join(filter(None, (_join_lines(sent.why), advised)))
    return kind(f"{where}: {_join_lines(sent.what)}", why=why, hint=there(where))


def _join_lines(text: str) -> str:
    """Return a node's words as one line without marks of a command."""
    return " ".join(text[:_LONGEST].replace("`", "'").split())
