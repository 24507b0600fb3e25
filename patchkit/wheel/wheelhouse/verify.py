"""Verify a wheelhouse: files, wheels, devices, and versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from patchkit.finding import Finding
from patchkit.wheel.wheelhouse.contents import manifest
from patchkit.wheel.wheelhouse.device_checks import unfit
from patchkit.wheel.wheelhouse.file_checks import check_files
from patchkit.wheel.wheelhouse.listed_wheel import read
from patchkit.wheel.wheelhouse.manifest import ManifestEntry
from patchkit.wheel.wheelhouse.override import Override
from patchkit.wheel.wheelhouse.overriding import known_overrides
from patchkit.wheel.wheelhouse.pin_checks import all_pins, disagreements, pin_table, unmet
from patchkit.wheel.wheelhouse.wheel_checks import check


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Entries of a wheelhouse and what is wrong with it; ``pins`` are the versions that decide.

    ``unmet`` is what its wheels pin and it does not hold, until it is filled;
    ``offers`` are overrides that known bugs suggest.
    """

    entries: tuple[ManifestEntry, ...]
    pins: Mapping[str, str]
    findings: tuple[Finding, ...]
    unmet: tuple[str, ...] = ()
    overrides: tuple[Override, ...] = ()
    offers: tuple[Override, ...] = ()


def verify(house: Path) -> Verified:
    """Find everything that is wrong with a wheelhouse.

    Raises SourceError if there is none, StorageError, BusyError.
    """
    files, listed = check_files(house), manifest(house)
    # A damaged wheel has its finding already, and is not opened.
    wheels, unread = read(house, listed.wheels, {finding.where for finding in files})
    found = [*files, *unread]
    for wheel in wheels:
        if wheel.built and wheel.metadata and wheel.metadata.facts:
            found += check(wheel.metadata, wheel.binaries)
        found += unfit(wheel)
    found += disagreements(house, wheels, listed.overrides)
    return Verified(
        entries=listed.wheels,
        pins=pin_table(wheels),
        findings=tuple(dict.fromkeys(found)),
        unmet=unmet(wheels),
        overrides=listed.overrides,
        offers=known_overrides(all_pins(wheels), listed.overrides),
    )
