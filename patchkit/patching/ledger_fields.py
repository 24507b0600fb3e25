"""The fields of a ledger, checked one by one: its tree may be somebody else's.

Every function raises ValueError, which says which field is not what patchkit writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import PurePosixPath
from typing import Any

from packaging.version import InvalidVersion, Version

from patchkit.patching.fix import Severity, State
from patchkit.target import MODES, targets

_RECIPE = re.compile(r"[0-9a-z]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,99}")
_STATES = {state.value for state in State}
_SEVERITIES = {"", *(severity.value for severity in Severity)}
_VERDICT = {"id", "state", "severity", "reason", "note"}
_REQUEST = {"target", "arch", "only", "skip", "also"}
_LISTS = ("only", "skip", "also")


def checked(table: object) -> dict[str, Any]:
    """Return the fields of a ledger with the types that ``Ledger`` has."""
    fields = {"date": "", **_object(table, "it")}
    if unknown := set(fields) ^ set(_CHECKS):
        raise ValueError(f"{', '.join(sorted(unknown))}: missing, or unknown")
    return {name: check(fields[name], name) for name, check in _CHECKS.items()}


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not an object")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is not a text")
    value.encode()  # half a surrogate pair, which JSON can name, is a ValueError
    return value


def _texts(value: object, name: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is not a list")
    return tuple(_text(each, name) for each in value)


def _matching(pattern: re.Pattern[str]) -> Callable[[object, str], str]:
    def check(value: object, name: str) -> str:
        text = _text(value, name)
        if not pattern.fullmatch(text):
            raise ValueError(f"{name} is {text[:60]!r}")
        return text

    return check


_id = _matching(_ID)


def _version(value: object, name: str) -> str:
    text = _text(value, name)
    try:
        Version(text)
    except InvalidVersion:
        raise ValueError(f"{name} is no version") from None
    return text


def _date(value: object, name: str) -> str:
    text = _text(value, name)
    if text and date.fromisoformat(text).isoformat() != text:
        raise ValueError(f"{name} is not as 2026-11-22")
    return text


def _digest(value: object, path: str) -> str:
    if value != "" and not (isinstance(value, str) and _SHA256.fullmatch(value)):
        raise ValueError(f"{path[:60]}: {str(value)[:60]!r} is no sha256")
    return str(value)


def _paths(value: object, name: str) -> dict[str, Any]:
    """Return an object whose keys are relative paths that stay where they begin."""
    found = _object(value, name)
    for path in found:
        _text(path, name)
        plain = PurePosixPath(path)
        inside = not plain.is_absolute() and ".." not in plain.parts and plain.name
        if not inside or str(plain) != path or "\0" in path:
            raise ValueError(f"{name}: {path[:60]!r} is not a plain path below the tree")
    return found


def _files(value: object, name: str) -> dict[str, tuple[str, str]]:
    files = {}
    for path, pair in _paths(value, name).items():
        if not (isinstance(pair, list) and len(pair) == 2 and pair[1]):
            raise ValueError(f"{name}: {path[:60]!r} has not two sha256")
        files[path] = (_digest(pair[0], path), _digest(pair[1], path))
    return files


def _seen(value: object, name: str) -> dict[str, str]:
    return {path: _digest(known, path) for path, known in _paths(value, name).items()}


def _request(value: object, name: str) -> dict[str, Any]:
    request = _object(value, name)
    if set(request) != _REQUEST:
        raise ValueError(f"{name} has not exactly {', '.join(sorted(_REQUEST))}")
    target, arch = _text(request["target"], "target"), request["arch"]
    if target not in targets() or arch not in MODES:
        raise ValueError(f"{name} is for no target and arch that patchkit knows")
    return {
        **request,
        **{key: [_id(each, key) for each in _texts(request[key], key)] for key in _LISTS},
    }


def _verdicts(value: object, name: str) -> tuple[Mapping[str, str], ...]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is not a list")
    verdicts = tuple(_verdict(each, name) for each in value)
    if len({each["id"] for each in verdicts}) < len(verdicts):
        raise ValueError(f"{name} has a fix twice")
    return verdicts


def _verdict(value: object, name: str) -> Mapping[str, str]:
    verdict = _object(value, name)
    if set(verdict) != _VERDICT:
        raise ValueError(f"{name}: one has not exactly {', '.join(sorted(_VERDICT))}")
    for key in _VERDICT:
        _text(verdict[key], f"{name}: {key}")
    if verdict["state"] not in _STATES or verdict["severity"] not in _SEVERITIES:
        raise ValueError(f"{name}: {_id(verdict['id'], 'id')} has an unknown state or severity")
    _id(verdict["id"], f"{name}: id")
    return verdict


def _format(value: object, name: str) -> int:
    if type(value) is not int:
        raise ValueError(f"{name} is not a number")
    return value


_CHECKS: Mapping[str, Callable[[object, str], Any]] = {
    "format": _format,
    "patchkit": _version,
    "recipe": _matching(_RECIPE),
    "project": _id,
    "version": _version,
    "date": _date,
    "request": _request,
    "files": _files,
    "seen": _seen,
    "verdicts": _verdicts,
    "proofs": _texts,
}
