"""Read versions and exact pins as users and data files write them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Self

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from patchkit.errors import UsageError

_MISTYPED = re.compile(r"(?P<name>[A-Za-z]*)\s*[-=@: ]*\s*v?(?P<version>\d+\.[\w.+]+)")
_PIN = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*==\s*([^\s=*;,]+)\s*")


class ExactPin(str):
    """An exact requirement, ``nvidia-nccl-cu13==2.30.7``; the project's name is canonical.

    It is made of its text; ValueError for any other one.
    """

    __slots__ = ("project", "version")
    project: str
    version: Version

    def __new__(cls, text: str) -> Self:
        if not (match := _PIN.fullmatch(text)):
            raise ValueError(f"is {text!r}, not PROJECT==VERSION")
        project, version = canonicalize_name(match[1]), Version(match[2])
        pin = super().__new__(cls, f"{project}=={version}")
        pin.project, pin.version = project, version
        return pin


def named_version(text: str, hint: str = "") -> Version:
    """Return the version that a text names. Raises UsageError for what PEP 440 does not allow."""
    try:
        return Version(text)
    except InvalidVersion:
        raise UsageError(f"{text!r} is not a version", hint=hint) from None


def meant(spec: str, projects: Iterable[str]) -> str:
    """Return a hint with the releases that ``vllm=0.25.1``, ``vlm==0.25.1`` or ``0.25.1`` may mean.

    It is empty if the text does not look like a release of one of the projects.
    """
    match = _MISTYPED.fullmatch(spec)
    try:
        Version(match["version"] if match else "")
    except InvalidVersion:
        return ""
    assert match is not None
    named = match["name"].lower()
    close = difflib.get_close_matches(named, projects, n=1) if named else projects
    releases = " or ".join(f"{name}=={match['version']}" for name in close)
    return f"did you mean {releases}?" if releases else ""
