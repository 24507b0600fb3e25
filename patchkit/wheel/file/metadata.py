"""Read what a wheel says about itself, and find what in it contradicts its name or its RECORD."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any, TypeVar

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import parse_tag
from packaging.utils import canonicalize_name

from patchkit.errors import SourceError
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.file.wheelfile import WheelFile, WheelName, record_digest

T = TypeVar("T")
_UNSIGNED = (
    "RECORD",
    "RECORD.jws",
    "RECORD.p7s",
)  # of .dist-info; PEP 427 gives them no digest


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelMetadata:
    """Metadata of a wheel, which outlives the open file.

    ``requires`` are its Requires-Dist, ``facts`` those of patchkit.json (empty if patchkit did not
    make it), ``members`` its paths, ``sboms`` those of its SBOMs; ``faults`` say what could not be
    read.
    """

    name: WheelName
    members: tuple[str, ...]
    requires: tuple[Requirement, ...] = ()
    requires_python: str = ""
    sboms: tuple[str, ...] = ()
    facts: Mapping[str, Any]
    faults: tuple[str, ...] = ()

    @property
    def pins(self) -> dict[str, str]:
        """Project → version, of what it requires as ``==`` and without an extra."""
        found: dict[str, str] = {}
        for requirement in self.requires:
            exact = [
                s.version for s in requirement.specifier if s.operator in ("==", "===")
            ]
            # ==2.* pins nothing, and beside a second specifier == is no pin either.
            one = len(requirement.specifier) == len(exact) == 1 and not exact[
                0
            ].endswith(".*")
            if one and "extra" not in str(requirement.marker or ""):
                found[canonicalize_name(requirement.name)] = exact[0]
        return found

    @property
    def decisive_pins(self) -> dict[str, str]:
        """The pins that decide which wheels fit together."""
        return {
            name: pin
            for name, pin in self.pins.items()
            if library_rules().pins.cover(name)
        }


def read_metadata(wheel: WheelFile) -> WheelMetadata:
    """Read what a wheel says about itself; what is malformed is among the faults, and no error."""
    faults: list[str] = []

    def tried(read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except (SourceError, InvalidSpecifier) as error:
            what = (
                error.what
                if isinstance(error, SourceError)
                else str(error).splitlines()[0]
            )
            faults.append(what.removeprefix(str(wheel.path)).removeprefix(":").lstrip())
        return otherwise

    members = tuple(wheel.members)
    home = tried(lambda: wheel.dist_info, "")
    headers = tried(lambda: wheel.message("METADATA"), Message())
    python = headers.get("Requires-Python", "")
    tried(lambda: SpecifierSet(python), SpecifierSet())  # for its fault alone
    requires = []
    for line in headers.get_all("Requires-Dist", []):
        try:
            requires.append(Requirement(line))
        except InvalidRequirement as error:
            faults.append(f"Requires-Dist: {str(error).splitlines()[0]}: {line[:80]!r}")
    sboms = sorted(path for path in members if path.startswith(f"{home}/sboms/"))
    return WheelMetadata(
        name=wheel.name,
        members=members,
        requires=tuple(requires),
        requires_python=python,
        sboms=tuple(sboms),
        facts=tried(lambda: wheel.facts, {}),
        faults=tuple(dict.fromkeys(faults)),
    )


def find_faults(path: Path) -> Iterator[str]:
    """Yield a sentence for each thing in a wheel that its name or its RECORD contradicts.

    A damaged wheel gives one such sentence, too. Raises StorageError if the disk fails.
    """
    try:
        with WheelFile(path) as wheel:
            metadata, name = wheel.message("METADATA"), wheel.name
            said = metadata.get("Name", ""), metadata.get("Version", "")
            if not wheel.is_of(*said):
                yield f"METADATA is of {' '.join(said)}, not {name.pinned}"
            tags = wheel.message("WHEEL").get_all("Tag", [])
            # WHEEL lists tags one by one, a file name may join them: py2.py3-none-any (PEP 425).
            if set().union(*map(parse_tag, tags)) != parse_tag(name.tag):
                yield f"WHEEL says {', '.join(tags) or 'no tag'}, the file name {name.tag}"
            home = wheel.dist_info
            rows = wheel.record(f"{home}/RECORD")
            unsigned = {f"{home}/{file}" for file in _UNSIGNED}
            listed = {*rows, *unsigned}
            yield from (
                f"{path}: is not in RECORD"
                for path in wheel.members
                if path not in listed
            )
            for member, (digest, size) in rows.items():
                info = wheel.members.get(member)
                if info is None:
                    yield f"{member}: is in RECORD only"
                elif member in unsigned:
                    continue
                elif not digest.startswith("sha256="):
                    yield f"{member}: has no sha256 in RECORD"
                elif size and str(info.file_size) != size:
                    yield f"{member}: has {info.file_size} bytes, {size} in RECORD"
                elif record_digest(wheel.unpacked(member)) != digest:
                    yield f"{member}: its sha256 is not the one in RECORD"
    except SourceError as error:
        yield error.what.removeprefix(str(path)).removeprefix(":").lstrip()
