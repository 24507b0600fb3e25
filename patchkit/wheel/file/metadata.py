"""What a wheel says of itself: pins, SBOMs, and what patchkit did to it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Any, TypeVar

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from patchkit.errors import SourceError
from patchkit.wheel.file.facts import FACTS
from patchkit.wheel.file.library_rules import rules
from patchkit.wheel.file.members import opened
from patchkit.wheel.file.record import WheelName, dist_info, text_of, wheel_name

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sbom:
    """A file of ``.dist-info/sboms``; ``fault`` says why it cannot be read as CycloneDX."""

    path: str
    spec: str = ""
    subject: str = ""
    components: int = 0
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """A wheel's own words.

    ``requires`` are its Requires-Dist, ``facts`` those of patchkit.json (empty if patchkit did not
    make it), ``members`` the paths in it; ``faults`` say what of this cannot be read.
    """

    name: WheelName
    members: tuple[str, ...]
    requires: tuple[Requirement, ...] = ()
    requires_python: str = ""
    sboms: tuple[Sbom, ...] = ()
    facts: Mapping[str, Any]
    faults: tuple[str, ...] = ()

    @property
    def pins(self) -> dict[str, str]:
        """Project → version, of what it requires as ``==`` and without an extra."""
        return {
            canonicalize_name(each.name): pin
            for each in self.requires
            if (pin := pinned(each)) and "extra" not in str(each.marker or "")
        }

    @property
    def decisive_pins(self) -> dict[str, str]:
        """Those that decide which wheels fit together."""
        return {name: pin for name, pin in self.pins.items() if rules().decisive(name)}


def pinned(requirement: Requirement) -> str:
    """The one version that ``==`` names; "" for anything wider."""
    if len(requirement.specifier) != 1:
        return ""
    (only,) = requirement.specifier
    exact = only.operator in ("==", "===") and not only.version.endswith(".*")
    return only.version if exact else ""


def about(wheel: Path) -> About:
    """Raises SourceError if this is no wheel for Linux, or damaged, or built to harm."""
    name = wheel_name(wheel.name)
    with opened(wheel) as (bundle, infos):
        members = tuple(info.filename for info in infos)
        faults: list[str] = []

        def tried(read: Callable[[], T], otherwise: T) -> T:
            try:
                return read()
            except (SourceError, InvalidSpecifier, UnicodeDecodeError) as error:
                faults.append(str(error).splitlines()[0])
            return otherwise

        home = tried(lambda: dist_info(members, name), "")
        if not home:
            return About(name=name, members=members, facts={}, faults=tuple(faults))
        metadata = tried(lambda: _headers(bundle, f"{home}/METADATA"), Message())
        python = metadata.get("Requires-Python", "")
        tried(lambda: SpecifierSet(python), SpecifierSet())
        return About(
            name=name,
            members=members,
            requires=tuple(_requirements(metadata, faults)),
            requires_python=python,
            sboms=tuple(_sbom(bundle, each) for each in sorted(members) if _is_sbom(each, home)),
            facts=tried(lambda: _facts(bundle, f"{home}/{FACTS}"), {}),
            faults=tuple(faults),
        )


def _headers(bundle: zipfile.ZipFile, path: str) -> Message:
    return HeaderParser().parsestr(text_of(bundle, path))


def _requirements(metadata: Message, faults: list[str]) -> Iterator[Requirement]:
    for line in metadata.get_all("Requires-Dist", []):
        try:
            yield Requirement(line)
        except InvalidRequirement as error:
            faults.append(f"Requires-Dist: {str(error).splitlines()[0]}: {line[:80]!r}")


def _is_sbom(path: str, home: str) -> bool:
    return path.startswith(f"{home}/sboms/")


def _sbom(bundle: zipfile.ZipFile, path: str) -> Sbom:
    try:
        bom = json.loads(text_of(bundle, path))
        if bom.get("bomFormat") != "CycloneDX":
            return Sbom(path=path, fault="it is not of CycloneDX")
        subject = bom.get("metadata", {}).get("component", {})
        return Sbom(
            path=path,
            spec=f"CycloneDX {bom['specVersion']}",
            subject=f"{subject.get('name', '')} {subject.get('version', '')}".strip(),
            components=len(bom.get("components", [])),
        )
    except (SourceError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Sbom(path=path, fault=str(error) or type(error).__name__)


def _facts(bundle: zipfile.ZipFile, path: str) -> dict[str, Any]:
    if path not in bundle.namelist():
        return {}
    try:
        facts = json.loads(text_of(bundle, path))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: is no JSON: {str(error)[:80]}") from None
    if not isinstance(facts, dict):
        raise SourceError(f"{path}: is no JSON object")
    return facts
