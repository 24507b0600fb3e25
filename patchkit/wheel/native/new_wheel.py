"""Write a library or a wheel anew, native; the wheel under a version of its own."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchkit import __version__
from patchkit.digests import digest
from patchkit.durable.atomic import replacing
from patchkit.errors import SourceError, UsageError, translated
from patchkit.source.fetch import Progress
from patchkit.target import Target
from patchkit.unreached import known_dispatch
from patchkit.wheel.build.machine import staging
from patchkit.wheel.file.sbom import as_text, digest_label, wheel_sbom
from patchkit.wheel.file.wheelfile import FACTS, WheelFile
from patchkit.wheel.file.write import rewrite_wheel
from patchkit.wheel.native.assemble import Assembler
from patchkit.wheel.native.listing import list_libraries
from patchkit.wheel.native.make import NativeLibrary, make_native, native_facts

_SBOM = "sboms/patchkit.cdx.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """A new wheel or library, and the libraries in it that are native."""

    path: Path
    libraries: tuple[NativeLibrary, ...]


def write_native_library(
    path: Path,
    dest: Path,
    target: Target,
    assembler: Assembler,
    report: Callable[[str], Progress],
) -> NewFile:
    """Write a library into ``dest``, native, under its own name. Raises as for a wheel."""
    if any(library.closed for library in list_libraries(path, target)):
        raise UsageError(f"{path}: is NVIDIA's own, which patchkit never rewrites")
    with staging() as folder:
        made = make_native(
            {path.name: path}, target, folder, assembler, report("Assembling PTX")
        )
        if not made or made[0].path is None:
            raise _nothing_error(path, target, made)
        _place_file(made[0].path, dest / path.name)
    return NewFile(path=dest / path.name, libraries=made)


def write_native_wheel(
    path: Path,
    dest: Path,
    target: Target,
    assembler: Assembler,
    report: Callable[[str], Progress],
) -> NewFile:
    """Assemble what the device would compile in a wheel, and write the new wheel into ``dest``.

    Its version ends with the device and a digest of what is new. Raises UsageError if there is
    nothing to assemble, and what ``make_native`` raises.
    """
    names = [
        library.name for library in list_libraries(path, target) if library.writable
    ]
    with staging() as folder, WheelFile(path) as wheel:
        files = wheel.extract(names, folder / "old")
        dispatch = known_dispatch(wheel.name.project, wheel.name.version, target)
        bar = report("Assembling PTX")
        made = make_native(files, target, folder, assembler, bar, dispatch)
        members = {each.name: each.path.read_bytes() for each in made if each.path}
        if not members:
            raise _nothing_error(path, target, made)
        version = wheel.name.version
        native = native_facts(made, assembler)
        lines = (f"{digest(data)}  {name}" for name, data in sorted(members.items()))
        label = digest_label(wheel.sha256, target.name, *lines)
        local = ".".join(
            [*([version.local] if version.local else []), target.name, label]
        )
        renamed = f"{version.public}+{local}"
        project = wheel.dist_info.removesuffix(".dist-info").rpartition("-")[0]
        home = f"{project}-{renamed}.dist-info"
        text = wheel.text(f"{wheel.dist_info}/METADATA")
        fields = wheel.message("METADATA")
        text, count = re.subn(r"(?m)^Version:.*$", f"Version: {renamed}", text, count=1)
        if not count:
            raise SourceError(f"{path}: METADATA names no version")
        facts = {
            "project": wheel.name.project,
            "version": str(version),
            "made": "native",
            "patchkit": __version__,
            "source": f"sha256:{wheel.sha256}",
            "source_file": wheel.name.filename,
            "target": target.name,
            "native": native,
            "fixes": [],
            "license": {
                wheel.name.project: fields.get("License-Expression", "NOASSERTION")
            },
            "wheel": renamed,
        }
        members |= {
            f"{home}/METADATA": text.encode(),
            f"{home}/{FACTS}": as_text(facts).encode(),
            f"{home}/{_SBOM}": as_text(wheel_sbom(facts, ())).encode(),
        }
        new = dest / f"{project}-{renamed}-{wheel.name.tag}.whl"
        written = folder / new.name
        rewrite_wheel(
            wheel, written, (wheel.dist_info, home), members, report("Writing")
        )
        _place_file(written, new)
    return NewFile(path=new, libraries=made)


def _place_file(made: Path, new: Path) -> None:
    with made.open("rb") as stream, translated(at=new):
        new.parent.mkdir(parents=True, exist_ok=True)
        if new.exists():
            raise UsageError(
                f"{new}: is there already", hint="name another folder with --output"
            )
        with replacing(new) as sink:
            shutil.copyfileobj(stream, sink)


def _nothing_error(
    path: Path, target: Target, made: Sequence[NativeLibrary]
) -> UsageError:
    why = [reason for library in made for reason in library.refused]
    return UsageError(
        f"{path}: nothing in it can be assembled for {target.title}",
        why=why[0] if why else "the device compiles nothing of it",
        hint="install it as it is",
    )
