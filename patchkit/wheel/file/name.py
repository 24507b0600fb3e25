"""Parse the file name of a wheel: project, version, tag, CPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from patchkit.errors import SourceError

ANY = "any"
_CHARACTERS = re.compile(r"[\w.+!-]+")
_LINUX = re.compile(r"(?:(?:many|musl)?linux(?:\d+|_\d+_\d+)?)_(?P<cpu>[a-z]\w*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelName:
    """The parts of a wheel's file name.

    ``tag`` is ``python-abi-platform`` as written; ``cpus`` are named as by ``platform.machine()``,
    or ``any``.
    """

    filename: str
    project: str
    version: Version
    tag: str
    cpus: frozenset[str]

    @property
    def pinned(self) -> str:
        return f"{self.project}=={self.version}"


def wheel_name(filename: str) -> WheelName:
    """Parse a file name. Raises SourceError unless it names a wheel for Linux or any platform."""
    try:
        if not _CHARACTERS.fullmatch(filename):
            raise InvalidWheelFilename("a character that file names of wheels do not have")
        project, version, _build, tags = parse_wheel_filename(filename)
    except ValueError as error:
        raise SourceError(
            f"{filename}: is not the name of a wheel: {error}",
            hint="rename it as it was built: NAME-VERSION-PYTHON-ABI-PLATFORM.whl",
        ) from None
    cpus = set()
    for tag in tags:
        match = _LINUX.fullmatch(tag.platform)
        if match is None and tag.platform != ANY:
            raise SourceError(f"{filename}: is for {tag.platform}, not for Linux")
        cpus.add(match["cpu"] if match else ANY)
    # From the right: a build tag may stand between version and tag (PEP 427).
    written = "-".join(filename.removesuffix(".whl").rsplit("-", 3)[1:])
    return WheelName(
        filename=filename, project=project, version=version, tag=written, cpus=frozenset(cpus)
    )
