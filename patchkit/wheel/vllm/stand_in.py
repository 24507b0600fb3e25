"""Take from wheels of the package index what vLLM takes from a git repository elsewhere.

``recipes/vllm/build.toml`` says which, by hash, and how they differ from the source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.utils import canonicalize_name

from patchkit.errors import StorageError, UsageError
from patchkit.recipes.vllm.build import BUILD_FILE, Wanted
from patchkit.records import Sha256, read_toml
from patchkit.source.fetch import Progress, fetch
from patchkit.source.lock import LockEntry
from patchkit.wheel.file.wheelfile import WheelFile


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """A wheel in the place of a source; ``recipes/vllm/build.toml`` describes the fields."""

    option: str
    project: str
    version: str
    filename: str
    sha256: Sha256
    size: int
    pins: tuple[str, ...]
    holds: str
    lacks: str
    parts: Mapping[str, str]
    defines: Mapping[str, str]
    majors: tuple[int, ...] = ()

    @property
    def spec(self) -> str:
        return f"{self.project}=={self.version}"

    @property
    def identity(self) -> str:
        return f"{self.spec}, sha256:{self.sha256}; holds {self.holds}"


@cache
def stand_ins() -> tuple[StandIn, ...]:
    """Return every wheel that is known to hold a source."""
    return read_toml(tuple[StandIn, ...], BUILD_FILE, key="stand_in")


def find_stand_in(wanted: Wanted, spec: str) -> StandIn:
    """Return the wheel ``PROJECT==VERSION``. Raises UsageError if it stands in for nothing here."""
    project, _, version = spec.partition("==")
    option, pin = wanted.known.option, wanted.external.pin
    fitting = [each for each in stand_ins() if each.option == option and pin in each.pins]
    for each in fitting:
        if (each.project, each.version) == (canonicalize_name(project), version):
            return each
    raise UsageError(
        f"--source {option}={spec}: this wheel is not known to hold {option} {pin}",
        why="only wheels that somebody looked into can stand in for a source",
        hint=f"there is: {', '.join(each.spec for each in fitting) or 'none'}; "
        "or name a folder or an archive",
    )


def unpack_stand_in(
    chosen: StandIn, dest: Path, *, offline: bool, progress: Progress | None
) -> None:
    """Put the parts of a wheel where the source has them; ``dest`` must not exist.

    Raises SourceError, HashMismatchError, StorageError as a fetch does.
    """
    entry = LockEntry(chosen.version, chosen.filename, chosen.sha256, chosen.size)
    lock = {chosen.version: entry}
    wheel = fetch(chosen.project, chosen.version, lock, offline=offline, progress=progress)
    try:
        with WheelFile(wheel) as opened:
            for path in opened.members:
                if place := _source_path(path, chosen.parts):
                    (dest / place).parent.mkdir(parents=True, exist_ok=True)
                    with (dest / place).open("wb") as sink:
                        sink.writelines(opened.unpacked(path))
        # vLLM's CMake adds the source as a project, and wheels have no CMake files.
        here = "${CMAKE_CURRENT_SOURCE_DIR}"
        lines = [f"# {chosen.spec} in the place of the whole project"]
        for name, folder in chosen.defines.items():
            place = f"{here}/{folder}" if folder else here
            lines.append(f'set({name} "{place}" CACHE PATH "")')
        (dest / "CMakeLists.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"cannot unpack {chosen.filename} into {dest}: {error.strerror or error}",
            hint="free some space, or build elsewhere",
        ) from error


def _source_path(name: str, parts: Mapping[str, str]) -> str:
    """Return where a file of the wheel belongs, "" if nowhere."""
    for part, folder in parts.items():
        rest = name.removeprefix(part.removesuffix("*").rstrip("/") + "/")
        # folder/* means its files alone, not those in folders below it.
        direct = not part.endswith("*") or "/" not in rest
        if rest != name and direct and ".." not in rest.split("/"):
            return f"{folder}/{rest}"
    return ""
