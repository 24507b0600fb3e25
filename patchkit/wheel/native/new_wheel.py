"""Write a native copy of a library or a wheel; the new wheel has a version of its own."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from patchkit import __version__
from patchkit.digests import digest
from patchkit.durable.atomic import replacing
from patchkit.errors import SourceError, UsageError, translated
from patchkit.frozen import frozen
from patchkit.source.resolve import Report
from patchkit.target import Target
from patchkit.unreached import known_dispatch
from patchkit.wheel.build.machine import staging
from patchkit.wheel.file.sbom import as_text, digest_label, wheel_sbom
from patchkit.wheel.file.wheelfile import FACTS, Facts, WheelFile
from patchkit.wheel.file.write import rewrite_wheel
from patchkit.wheel.native.assemble import Assembler
from patchkit.wheel.native.listing import list_libraries
from patchkit.wheel.native.make import NativeLibrary, make_native, native_facts

_SBOM = "sboms/patchkit.cdx.json"


@frozen
class NewFile:
    """A new wheel or library, and its libraries that had PTX to assemble."""

    path: Path
    libraries: tuple[NativeLibrary, ...]


def write_native_library(
    path: Path,
    dest: Path,
    target: Target,
    assembler: Assembler,
    report: Report,
) -> NewFile:
    """Write a native copy of a library into the folder ``dest``, under the same name.

    Raises UsageError if the library is NVIDIA's own, if there is nothing to assemble, or if the
    file exists already; and the errors of ``make_native``.
    """
    if any(library.closed for library in list_libraries(path, target)):
        raise UsageError(f"{path}: is NVIDIA's own, which patchkit never rewrites")

    new = dest / path.name
    files = {path.name: path}
    with staging() as folder:
        bar = report("Assembling PTX")
        libraries = make_native(files, target, folder, assembler, bar)
        if not libraries or libraries[0].path is None:
            raise _nothing_error(path, target, libraries)
        _place_file(libraries[0].path, new)

    return NewFile(path=new, libraries=libraries)


def write_native_wheel(
    path: Path,
    dest: Path,
    target: Target,
    assembler: Assembler,
    report: Report,
) -> NewFile:
    """Assemble the PTX that the device would compile in a wheel; write a new wheel into ``dest``.

    The new version ends with the device and a digest of the wheel and its new libraries. Raises
    UsageError if there is nothing to assemble or the file exists already, and the errors of
    ``make_native``.
    """
    names = [
        library.name for library in list_libraries(path, target) if library.writable
    ]

    with staging() as folder, WheelFile(path) as wheel:
        files = wheel.extract(names, folder / "old")
        dispatch = known_dispatch(wheel.name.project, wheel.name.version, target)
        bar = report("Assembling PTX")
        libraries = make_native(files, target, folder, assembler, bar, dispatch)
        members = {
            library.name: library.path.read_bytes()
            for library in libraries
            if library.path
        }
        if not members:
            raise _nothing_error(path, target, libraries)

        version = _native_version(wheel, target, members)
        project = wheel.dist_info.removesuffix(".dist-info").rpartition("-")[0]
        home = f"{project}-{version}.dist-info"
        facts = _wheel_facts(wheel, target, version)
        facts["native"] = native_facts(libraries, assembler)

        members[f"{home}/METADATA"] = _rename_version(wheel, version)
        members[f"{home}/{FACTS}"] = as_text(facts).encode()
        members[f"{home}/{_SBOM}"] = as_text(wheel_sbom(facts, ())).encode()

        new = dest / f"{project}-{version}-{wheel.name.tag}.whl"
        written = folder / new.name
        homes = (wheel.dist_info, home)
        rewrite_wheel(wheel, written, homes, members, report("Writing"))
        _place_file(written, new)

    return NewFile(path=new, libraries=libraries)


def _native_version(
    wheel: WheelFile,
    target: Target,
    members: Mapping[str, bytes],
) -> str:
    """Return the version with the device, and a digest of the old wheel and the new libraries."""
    lines = (f"{digest(data)}  {name}" for name, data in sorted(members.items()))
    label = f"{target.name}.{digest_label(wheel.sha256, target.name, *lines)}"
    version = wheel.name.version
    if version.local:
        label = f"{version.local}.{label}"
    return f"{version.public}+{label}"


def _rename_version(wheel: WheelFile, version: str) -> bytes:
    text = wheel.text(f"{wheel.dist_info}/METADATA")
    text, count = re.subn(r"(?m)^Version:.*$", f"Version: {version}", text, count=1)
    if not count:
        raise SourceError(f"{wheel.path}: METADATA names no version")
    return text.encode()


def _wheel_facts(wheel: WheelFile, target: Target, version: str) -> Facts:
    name = wheel.name
    spdx = wheel.message("METADATA").get("License-Expression", "NOASSERTION")
    return {
        "project": name.project,
        "version": str(name.version),
        "made": "native",
        "patchkit": __version__,
        "source": f"sha256:{wheel.sha256}",
        "source_file": name.filename,
        "target": target.name,
        "fixes": [],
        "license": {name.project: spdx},
        "wheel": version,
    }


def _place_file(written: Path, new: Path) -> None:
    with written.open("rb") as stream, translated(at=new):
        new.parent.mkdir(parents=True, exist_ok=True)
        if new.exists():
            raise UsageError(
                f"{new}: is there already",
                hint="name another folder with --output",
            )

        with replacing(new) as sink:
            shutil.copyfileobj(stream, sink)


def _nothing_error(
    path: Path,
    target: Target,
    libraries: Sequence[NativeLibrary],
) -> UsageError:
    reasons = [reason for library in libraries for reason in library.refused]
    reasons.append("the device compiles nothing of it")
    return UsageError(
        f"{path}: nothing in it can be assembled for {target.title}",
        why=reasons[0],
        hint="install it as it is",
    )
