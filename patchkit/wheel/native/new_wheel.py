"""Write a native copy of a wheel, which has a version of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

from patchkit.durable.atomic import replacing
from patchkit.errors import UsageError, translated
from patchkit.frozen import frozen
from patchkit.source.resolve import Report
from patchkit.target import Target
from patchkit.wheel.build.machine import staging
from patchkit.wheel.file.sbom import UNLABELLED, made_facts, name_wheel
from patchkit.wheel.file.wheelfile import WheelFile
from patchkit.wheel.file.write import rewrite_wheel
from patchkit.wheel.native.assemble import Assembler
from patchkit.wheel.native.make import NativeLibraries
from patchkit.wheel.native.parts import native_parts, read_kernels


@frozen
class NewFile:
    """A new wheel, and its libraries that had PTX to assemble."""

    path: Path
    libraries: NativeLibraries


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
    with staging() as folder, WheelFile(path) as wheel:
        native = native_parts(
            wheel,
            read_kernels(wheel, target),
            target,
            folder,
            assembler,
            report("Assembling PTX"),
            keep=True,
        )
        members = native.members
        if not members:
            reasons = [reason for row in native.libraries for reason in row.refused]
            raise UsageError(
                f"{path}: nothing in it can be assembled for {target.title}",
                why=[*reasons, "the device compiles nothing of it"][0],
                hint="install it as it is",
            )

        name = wheel.name
        label = f"{target.name}.{UNLABELLED}"
        if name.version.local:
            label = f"{name.version.local}.{label}"
        facts = made_facts(wheel, "native", target.name) | {
            "version": str(name.version),
            "fixes": [],
            "native": native.facts,
            "wheel": f"{name.version.public}+{label}",
        }
        made = name_wheel(wheel, name.tag, facts, (), members)
        new = dest / made.filename
        written = folder / new.name
        rewrite_wheel(wheel, written, made.members, report("Writing"))
        with written.open("rb") as stream, translated(at=new):
            new.parent.mkdir(parents=True, exist_ok=True)
            if new.exists():
                raise UsageError(
                    f"{new}: is there already",
                    hint="name another folder with --output",
                )

            with replacing(new) as sink:
                shutil.copyfileobj(stream, sink)

    return NewFile(path=new, libraries=native.libraries)
