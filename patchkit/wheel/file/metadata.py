"""Read a wheel's metadata, and find what in it contradicts its file name or its RECORD."""

from collections.abc import Callable, Collection, Iterator
from email.message import Message
from pathlib import Path
from typing import TypeVar

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import parse_tag
from packaging.utils import canonicalize_name

from patchkit.errors import SourceError
from patchkit.frozen import Texts, Values, frozen
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.file.wheelfile import Facts, WheelFile, WheelName, record_digest

T = TypeVar("T")


@frozen
class WheelMetadata:
    """Metadata of a wheel, which stays valid after the file is closed.

    ``members`` are the paths of all files, ``sboms`` those of SBOMs. ``requires`` is Requires-Dist.
    ``facts`` are the contents of patchkit.json, empty if patchkit did not make the wheel.
    ``faults`` are sentences about malformed parts.
    """

    name: WheelName
    members: Texts
    requires: tuple[Requirement, ...]
    requires_python: str
    sboms: Texts
    facts: Facts
    faults: Texts

    @property
    def pins(self) -> Values:
        """Return project → version for each requirement with ``==`` that belongs to no extra."""
        pins: dict[str, str] = {}
        for requirement in self.requires:
            specifiers = list(requirement.specifier)
            # A requirement with a second specifier, such as ==1.0,!=1.0.1, is no pin.
            if len(specifiers) != 1 or "extra" in str(requirement.marker or ""):
                continue

            (specifier,) = specifiers
            is_exact = specifier.operator in ("==", "===")
            if is_exact and not specifier.version.endswith(".*"):
                pins[canonicalize_name(requirement.name)] = specifier.version

        return pins

    @property
    def decisive_pins(self) -> Values:
        """Return the pins of the projects that ``wheel_rules.toml`` lists as decisive.

        They decide which wheels fit together.
        """
        rules = library_rules().pins
        return {name: pin for name, pin in self.pins.items() if rules.cover(name)}


def read_metadata(wheel: WheelFile) -> WheelMetadata:
    """Read the metadata of a wheel. A malformed part becomes a fault in the result, not an error.

    Raises StorageError if the disk fails.
    """
    faults: list[str] = []

    def tried(read: Callable[[], T], default: T) -> T:
        try:
            return read()
        except SourceError as error:
            faults.append(_without_path(error, wheel.path))
        except InvalidSpecifier as error:
            faults.append(str(error).splitlines()[0])
        return default

    members = tuple(wheel.members)
    home = tried(lambda: wheel.dist_info, "")
    headers = tried(lambda: wheel.message("METADATA"), Message())
    python = headers.get("Requires-Python", "")
    # Only to note a fault if Requires-Python is malformed.
    tried(lambda: SpecifierSet(python), SpecifierSet())

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


def native_claim(facts: Facts, key: str) -> Collection[str]:
    """Return the libraries that patchkit.json names under a key; none if it has another form.

    Anybody can write that claim: ``assembled``, ``compiled_at_first_use``.
    """
    native = facts.get("native")
    names = native.get(key) if isinstance(native, dict) else None
    return names if isinstance(names, dict) else ()


def _without_path(error: SourceError, path: Path) -> str:
    return error.what.removeprefix(str(path)).removeprefix(":").lstrip()


def find_faults(path: Path) -> Iterator[str]:
    """Yield a sentence for each contradiction between a wheel, its file name and its RECORD.

    If the wheel is damaged, a sentence says so and is the last one. Raises StorageError if the disk
    fails.
    """
    try:
        with WheelFile(path) as wheel:
            yield from _check_identity(wheel)
            yield from _check_record(wheel)
    except SourceError as error:
        yield _without_path(error, path)


def _check_identity(wheel: WheelFile) -> Iterator[str]:
    name = wheel.name
    metadata = wheel.message("METADATA")
    project = metadata.get("Name", "")
    version = metadata.get("Version", "")
    if not wheel.is_of(project, version):
        yield f"METADATA is of {project} {version}, not {name.pinned}"

    tags = wheel.message("WHEEL").get_all("Tag", [])
    # WHEEL lists single tags. A file name may join several: py2.py3-none-any (PEP 425).
    if set().union(*map(parse_tag, tags)) != parse_tag(name.tag):
        yield f"WHEEL says {', '.join(tags) or 'no tag'}, the file name {name.tag}"


def _check_record(wheel: WheelFile) -> Iterator[str]:
    home = wheel.dist_info
    rows = wheel.record(f"{home}/RECORD")
    # Files that have no digest in RECORD (PEP 427).
    unsigned = {f"{home}/RECORD{suffix}" for suffix in ("", ".jws", ".p7s")}
    for path in wheel.members:
        if path not in rows and path not in unsigned:
            yield f"{path}: is not in RECORD"

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
