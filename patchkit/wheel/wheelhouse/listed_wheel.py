"""Read the wheels of a wheelhouse: what they say about themselves, and what is in them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchkit.durable.names import is_file
from patchkit.errors import SourceError
from patchkit.finding import Finding, finding
from patchkit.target import Target, targets
from patchkit.wheel.device.inspect import Binary, inspect_wheel
from patchkit.wheel.file.metadata import WheelMetadata, read_metadata
from patchkit.wheel.file.name import ANY
from patchkit.wheel.file.wheelfile import WheelFile
from patchkit.wheel.wheelhouse.manifest import Kind, ManifestEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedWheel:
    """A wheel that the manifest lists.

    ``metadata`` is None for what is only locked. ``binaries`` are those of wheels that were built
    here, as nobody else's are judged.
    """

    entry: ManifestEntry
    path: Path
    metadata: WheelMetadata | None = None
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
        name = self.metadata.facts.get("target") if self.metadata else None
        return targets().get(name) if isinstance(name, str) else None


def read_listed_wheels(
    house: Path, listed: Sequence[ManifestEntry], spoiled: Collection[str] = ()
) -> tuple[list[ListedWheel], list[Finding]]:
    """Read the wheels, and say why some cannot be read; those that are ``spoiled`` stay closed."""
    wheels, found = [], []
    for entry in listed:
        path = house / entry.filename
        if not is_file(path) or entry.filename in spoiled:
            wheels.append(ListedWheel(entry=entry, path=path))
            continue
        try:
            wheels.append(_read_listed(entry, path))
        except SourceError as error:
            what = error.what.removeprefix(f"{path}: ")
            found.append(finding(SourceError, entry.filename, what, error.hint, error.why))
            wheels.append(ListedWheel(entry=entry, path=path))
    return wheels, found


def _read_listed(entry: ManifestEntry, path: Path) -> ListedWheel:
    with WheelFile(path) as wheel:
        metadata = read_metadata(wheel)
        if entry.kind is not Kind.BUILT or ANY in entry.name.cpus or not metadata.facts:
            return ListedWheel(entry=entry, path=path, metadata=metadata)
        binaries = inspect_wheel(wheel)
        return ListedWheel(entry=entry, path=path, metadata=metadata, binaries=binaries)
