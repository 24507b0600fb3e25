"""Read which packages the nodes have already, so that a fill downloads only what they lack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from patchkit.errors import UsageError
from patchkit.reading import read_text
from patchkit.versions import ExactPin
from patchkit.wheel.file.name import WheelName

NodePackages = Mapping[str, Version]
"""Project → version, of what every node has."""


def read_packages(files: Sequence[Path]) -> NodePackages:
    """Return what all nodes have, of files with what `pip list --format=freeze` printed on each.

    Raises UsageError, naming the line, for what is not PROJECT==VERSION.
    """
    listed = [{*_pins(file)} for file in files]
    common = set.intersection(*listed) if listed else set()
    return {pin.project: pin.version for pin in common}


def is_met(packages: NodePackages, wheel: WheelName) -> bool:
    """Check whether a node has what a lock names: for pip, 2.11.0+cu130 is a 2.11.0."""
    version = packages.get(wheel.project)
    return version is not None and SpecifierSet(f"=={wheel.version}").contains(
        version, prereleases=True
    )


def _pins(file: Path) -> list[ExactPin]:
    pins = []
    hint = "on a node: pip list --format=freeze > FILE"
    for number, line in enumerate(read_text(file, hint=hint).splitlines(), 1):
        text = line.partition("#")[0].strip()
        try:
            pins += [ExactPin(text)] if text else []
        except ValueError as error:
            why = "pip freeze names no version of what came from a folder or a URL"
            raise UsageError(f"{file}:{number}: {error}", why=why, hint=hint) from None
    return pins
