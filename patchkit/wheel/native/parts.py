"""Make the native parts of a wheel: libraries with machine code in the place of PTX."""

from collections.abc import Iterable
from dataclasses import field
from fnmatch import fnmatchcase
from pathlib import Path

from patchkit.frozen import Texts, frozen
from patchkit.recipes.vllm.build import KnownSource
from patchkit.source.fetch import Progress
from patchkit.target import Target
from patchkit.wheel.device.inspect import Binaries, inspect_wheel, jit_entries
from patchkit.wheel.device.libraries import Judgements, cuda_major, judge_libraries
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.file.wheelfile import Facts, WheelFile
from patchkit.wheel.native.assemble import Assembler
from patchkit.wheel.native.make import NativeLibraries, make_native, native_facts


@frozen
class Kernels:
    """The libraries of a wheel, each judged on the device."""

    binaries: Binaries
    judged: Judgements

    @property
    def cuda(self) -> str:
        """Return the major version of the CUDA that the libraries are linked with.

        Return "" for libraries that no table knows, if they need none or several.
        """
        majors = {str(major) for binary in self.binaries for major in binary.cuda}
        if self.judged or len(majors) == 1:
            return cuda_major(self.binaries)
        return ""


def read_kernels(wheel: WheelFile, target: Target) -> Kernels:
    """Read the libraries of a wheel. Raises SourceError for a damaged one."""
    binaries = inspect_wheel(wheel)
    judged = judge_libraries(binaries, target, wheel.name)
    return Kernels(binaries=binaries, judged=judged)


@frozen
class NativeParts:
    """The libraries of a wheel that were made native; none for a wheel that stays as it is."""

    libraries: NativeLibraries = ()
    facts: Facts = field(default_factory=dict)

    @property
    def members(self) -> dict[str, bytes]:
        """The new libraries, by their path in the wheel."""
        return {
            library.name: library.path.read_bytes()
            for library in self.libraries
            if library.path
        }

    @property
    def count(self) -> int:
        """The number of fat binaries that were assembled."""
        return sum(len(library.ptx) for library in self.libraries)

    @property
    def refused_notes(self) -> list[str]:
        """Sentences about the PTX that the device still compiles."""
        return [
            f"{reason}; it is compiled at first use"
            for library in self.libraries
            for reason in library.refused
        ]


def native_parts(
    wheel: WheelFile,
    kernels: Kernels,
    target: Target,
    folder: Path,
    assembler: Assembler,
    progress: Progress,
) -> NativeParts:
    """Assemble the PTX in a wheel's libraries that the device would compile, into ``folder``.

    Raises the errors of ``make_native``.
    """
    names = [
        binary.name
        for binary in kernels.binaries
        if jit_entries(binary, target)
        and not library_rules().is_closed(wheel.name.project, binary.name)
    ]
    # Each in a folder of its own, since members may have the same file name.
    files = {
        name: wheel.copy_member(name, folder / "old" / str(number) / Path(name).name)
        for number, name in enumerate(names)
    }
    made = make_native(files, target, folder, assembler, progress)
    return NativeParts(libraries=made, facts=native_facts(made, assembler))


def members_of(known: KnownSource, paths: Iterable[str]) -> Texts:
    """Return the paths of a wheel that belong to a source, in their order."""
    return tuple(
        path
        for path in paths
        if any(fnmatchcase(path, part) for part in known.installed)
    )
