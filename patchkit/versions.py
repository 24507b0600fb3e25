"""Read versions and exact pins as users and data files write them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from patchkit.errors import UsageError

_PIN = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*==\s*([^\s=*;,]+)\s*")


class ExactPin:
    """An exact requirement, ``nvidia-nccl-cu13==2.30.7``; the project's name is canonical.

    It is made of its text; ValueError for any other one.
    """

    __slots__ = ("project", "version")

    def __init__(self, text: str) -> None:
        if not (match := _PIN.fullmatch(text)):
            raise ValueError(f"is {text!r}, not PROJECT==VERSION")
        self.project = str(canonicalize_name(match[1]))
        self.version = Version(match[2])

    def __str__(self) -> str:
        return f"{self.project}=={self.version}"

    def __repr__(self) -> str:
        return f"ExactPin({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExactPin) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


_MISTYPED = re.compile(r"(?P<name>[A-Za-z]*)\s*[-=@: ]*\s*v?(?P<version>\d+\.[\w.+]+)")


def named_version(text: str, hint: str = "") -> Version:
    """Return the version that a text names. Raises UsageError for what PEP 440 does not allow."""
    try:
        return Version(text)
    except InvalidVersion:
        raise UsageError(f"{text!r} is not a version", hint=hint) from None


def named_pin(text: str, hint: str = "") -> ExactPin:
    """Return the pin that a text names. Raises UsageError if it is not PROJECT==VERSION."""
    try:
        return ExactPin(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a pin, PROJECT==VERSION", hint=hint) from None


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
