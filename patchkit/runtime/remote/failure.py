"""Send an error of patchkit from a node, and raise it again where somebody reads it."""

from __future__ import annotations

from dataclasses import dataclass

from patchkit import errors
from patchkit.errors import HostError, PatchkitError
from patchkit.records import RecordError, record

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
    """Return the error that a node sent; its text begins with the node's name."""
    try:
        sent = record(_Sent, fields)
    except RecordError:
        return HostError(f"{where}: an answer that is none", hint="install patchkit again here")
    kind = _KINDS.get(sent.kind, HostError)
    return kind(f"{where}: {sent.what}", why=sent.why, hint=sent.hint)
