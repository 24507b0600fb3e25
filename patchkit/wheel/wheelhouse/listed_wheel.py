"""The wheels of a wheelhouse, read: what they say of themselves, and what is in them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchkit.durable.names import is_file
from patchkit.errors import SourceError
from patchkit.finding import Finding, finding
from patchkit.target import Target, targets
from patchkit.wheel.device.inspect import Binary, inspect
from patchkit.wheel.file.metadata import About, about
from patchkit.wheel.file.record import ANY
from patchkit.wheel.wheelhouse.manifest import Entry, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A wheel that the manifest lists.

    ``about`` is None for what is only locked; ``binaries`` are those of wheels that were built
    here, as nobody else's are judged.
    """

    entry: Entry
    place: Path
    about: About | None
    binaries: tuple[Binary, ...] = ()

    @property
    def filename(self) -> str:
        return self.entry.filename

    @property
    def project(self) -> str:
        return self.entry.name.project

    @property
    def built(self) -> bool:
        return self.entry.kind is Kind.BUILT

    @property
    def target(self) -> Target | None:
        """The device that patchkit.json in it names."""
        name = self.about.facts.get("target") if self.about else None
        return targets().get(name) if isinstance(name, str) else None


def read(
    house: Path, listed: Sequence[Entry], spoiled: Collection[str] = ()
) -> tuple[list[Wheel], list[Finding]]:
    """The wheels, and why some cannot be read; nobody looks into those that are ``spoiled``."""
    wheels, found = [], []
    for entry in listed:
        place = house / entry.filename
        if not is_file(place) or entry.filename in spoiled:
            wheels.append(Wheel(entry=entry, place=place, about=None))
            continue
        try:
            wheels.append(_read(entry, place))
        except SourceError as error:
            what = error.what.removeprefix(f"{place}: ")
            found.append(finding(SourceError, entry.filename, what, error.hint, error.why))
            wheels.append(Wheel(entry=entry, place=place, about=None))
    return wheels, found


def _read(entry: Entry, place: Path) -> Wheel:
    said = about(place)
    has_code = entry.kind is Kind.BUILT and ANY not in entry.name.cpus and bool(said.facts)
    binaries = inspect(place) if has_code else ()
    return Wheel(entry=entry, place=place, about=said, binaries=binaries)


def by_cpu(wheels: Sequence[Wheel]) -> Iterator[tuple[str, list[Wheel]]]:
    """For each CPU that a wheel was built for, what a node with it can install."""
    for cpu in sorted({cpu for wheel in wheels for cpu in wheel.entry.name.cpus} - {ANY}):
        yield cpu, [wheel for wheel in wheels if wheel.entry.name.cpus & {cpu, ANY}]
