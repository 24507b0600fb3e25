"""Check what is in a wheel against what its name promises."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import parse_tag

from patchkit.elf import by_version
from patchkit.errors import SourceError
from patchkit.finding import Finding, finding
from patchkit.wheel.device.inspect import Binary
from patchkit.wheel.file.library_rules import rules
from patchkit.wheel.file.metadata import WheelMetadata

_MODULE = re.compile(r"(?P<stem>.+)\.cpython-3(?P<minor>\d+)(?P<flags>[a-z]*)-[\w-]+\.so")
_TAG = re.compile(r"(?:cp|py)3(?P<minor>\d*)")
_LATEST = 30  # minor versions of Python 3 that are asked of a Requires-Python without an end
_FAMILIES = ("GLIBC", "GLIBCXX", "CXXABI")


def floor(binaries: Sequence[Binary]) -> dict[str, str]:
    """Return the highest symbol version of each family that any of them needs, ``GLIBC_2.34``."""
    highest = {
        family: max(
            (binary.library.highest(family) for binary in binaries), key=by_version, default=""
        )
        for family in _FAMILIES
    }
    return {family: version for family, version in highest.items() if version}


def promised_glibc(tag: str) -> str:
    """Return the oldest glibc that a tag names as enough; "" for ``linux_aarch64``."""
    said = {rules().glibc(part.platform) for part in parse_tag(tag)}
    return "" if not all(said) else min(said, key=by_version)


def too_new(metadata: WheelMetadata, binaries: Sequence[Binary]) -> Iterator[Finding]:
    """Find libraries that need a newer system than the wheel's name says."""
    if not (glibc := promised_glibc(metadata.name.tag)):
        return
    allowed = rules().allowed(glibc)
    for binary in binaries:
        for family, limit in allowed.items():
            needed = binary.library.highest(family)
            if by_version(needed) > by_version(f"{family}_{limit}"):
                yield finding(
                    SourceError,
                    binary.name,
                    f"needs {needed}, the name of the wheel promises {glibc} to be enough",
                    "give the wheel the tag that auditwheel shows for it",
                    "pip installs it where it cannot be loaded",
                )


def uncovered(metadata: WheelMetadata) -> Iterator[Finding]:
    """Find modules that are built for one Python each, but not for every one of the wheel's."""
    wanted = supported(metadata)
    built: dict[str, set[int]] = {}
    for member in metadata.members:
        # cpython-313t is of the free-threaded build, another ABI: it covers no ordinary Python.
        if (match := _MODULE.fullmatch(member)) and not match["flags"]:
            built.setdefault(match["stem"], set()).add(int(match["minor"]))
    for stem, minors in sorted(built.items()):
        if missing := sorted(set(wanted) - minors):
            yield finding(
                SourceError,
                stem,
                f"is built for CPython {_minors(sorted(minors))} alone, the wheel is for "
                f"{_minors(wanted)} too",
                "build it for each Python, or give the wheel the tag of its one Python",
                f"{metadata.name.tag} and Requires-Python {metadata.requires_python or '(none)'}: "
                f"it cannot be imported on 3.{missing[0]}",
            )


def supported(metadata: WheelMetadata) -> list[int]:
    """Return the minor versions of CPython 3 that tag and Requires-Python allow, up to 3.30."""
    try:
        allowed = SpecifierSet(metadata.requires_python)
    except InvalidSpecifier:
        allowed = SpecifierSet()
    found: set[int] = set()
    for tag in parse_tag(metadata.name.tag):
        if match := _TAG.fullmatch(tag.interpreter):
            first = int(match["minor"] or 0)
            one = tag.abi.startswith("cp") or (tag.abi == "none" and tag.interpreter[:2] == "cp")
            found |= {first} if one else set(range(first, _LATEST + 1))
    return sorted(minor for minor in found if allowed.contains(f"3.{minor}"))


def _minors(minors: Sequence[int]) -> str:
    """Write ``3.10 to 3.14`` or ``3.12``; a row without an end is ``3.10 and later``."""
    if len(minors) > 1 and minors[-1] == _LATEST:
        return f"3.{minors[0]} and later"
    if len(minors) > 2 and minors == list(range(minors[0], minors[-1] + 1)):
        return f"3.{minors[0]} to 3.{minors[-1]}"
    return ", ".join(f"3.{minor}" for minor in minors)
