"""Describe devices, parse arch strings, and decide which code runs on which device."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from patchkit.errors import UsageError
from patchkit.frozen import Fields, Texts, frozen, positional
from patchkit.records import RECIPES, read_toml

DEFAULT_TARGET = "gb10"
"""The device to use if no GPU is found and the user names none."""
MODES = ("native", "family")
"""A ``native`` build is for one device, a ``family`` build for all devices of its family."""
# The minor version has one digit, since nvcc writes 12.1 as 121, without a separator.
_ARCH = r"(?P<major>\d{1,3})\.(?P<minor>\d)(?P<suffix>[af]?)(?P<ptx>\+PTX)?(?P<virtual>-virtual)?"

_CODE = r"(?P<kind>\w+)_(?P<major>\d+)(?P<minor>\d)(?P<suffix>[af]?)"


@positional
class Arch:
    """One entry of an arch list: ``12.1a``, ``12.0f``, ``8.0+PTX``, ``8.0-virtual``.

    ``ptx`` says that PTX is added to the machine code. ``virtual``, CMake's word, means PTX without
    machine code.
    """

    major: int
    minor: int
    suffix: str
    ptx: bool
    virtual: bool = False

    @property
    def capability(self) -> tuple[int, int]:
        return self.major, self.minor

    @property
    def gencode(self) -> str:
        """Return the name that nvcc uses behind ``compute_`` and ``sm_``: ``121a``."""
        return f"{self.major}{self.minor}{self.suffix}"

    @property
    def codes(self) -> Texts:
        """Return the names that nvcc takes after ``code=``: ``sm_121a``, ``compute_121a``."""
        machine = f"sm_{self.gencode}"
        ptx = f"compute_{self.gencode}"
        if self.virtual:
            return (ptx,)
        return (machine, ptx) if self.ptx else (machine,)


def parse_arch(text: str) -> Arch:
    """Read ``M.m[a|f][+PTX|-virtual]``. Raises UsageError for anything else."""
    match = re.fullmatch(_ARCH, text.strip())
    if match is None or (match["ptx"] and match["virtual"]):
        raise UsageError(
            f"{text!r} is not an arch",
            hint="write it as TORCH_CUDA_ARCH_LIST does: 12.1a or 12.0f",
        )

    return Arch(
        int(match["major"]),
        int(match["minor"]),
        match["suffix"],
        ptx=bool(match["ptx"]),
        virtual=bool(match["virtual"]),
    )


def list_archs(codes: Iterable[str]) -> Texts:
    """Return names that nvcc takes after ``code=`` as entries of an arch list, in their order.

    ``sm_89`` with ``compute_89`` becomes ``8.9+PTX``, ``compute_80`` alone becomes ``8.0-virtual``.
    Names without a number, such as ``native``, are left out.
    """
    kinds_of: dict[str, set[str]] = {}
    for code in codes:
        if match := re.fullmatch(_CODE, code):
            arch = f"{match['major']}.{match['minor']}{match['suffix']}"
            kinds_of.setdefault(arch, set()).add(match["kind"])

    archs = []
    for arch, kinds in kinds_of.items():
        if "compute" in kinds:
            arch += "+PTX" if len(kinds) > 1 else "-virtual"
        archs.append(arch)
    return tuple(archs)


class Load(enum.IntEnum):
    """How code reaches a device, best first, by NVIDIA's rules of binary compatibility.

    EXACT, FAMILY and COMPATIBLE machine code is loaded as it is: it was built for the device's own
    capability, for its family (suffix ``f``), or for an earlier minor version. JIT is PTX that the
    driver compiles. NONE does not run.
    """

    EXACT = 4
    FAMILY = 3
    COMPATIBLE = 2
    JIT = 1
    NONE = 0

    def __str__(self) -> str:
        return self.name.lower()


def find_load(arch: Arch, capability: tuple[int, int]) -> Load:
    """Return how code built for ``arch`` reaches a device of ``capability``.

    Machine code also loads on devices with the same major and a later minor version, unless its
    arch has the suffix ``a``. PTX without a suffix is compiled on any later device.
    """
    if arch.virtual:
        return find_ptx_load(arch, capability)
    if arch.capability == capability:
        return Load.EXACT

    is_earlier = arch.capability < capability
    is_same_major = arch.major == capability[0]
    if is_earlier and is_same_major and arch.suffix != "a":
        return Load.FAMILY if arch.suffix == "f" else Load.COMPATIBLE

    if is_earlier and arch.ptx and not arch.suffix:
        return Load.JIT
    return Load.NONE


def find_ptx_load(arch: Arch, capability: tuple[int, int]) -> Load:
    """Return JIT if the driver of a device can compile PTX for ``arch``, else NONE.

    PTX without a suffix is compiled on its own and every later device, PTX with ``f`` on those of
    the same major version, PTX with ``a`` on its own device alone.
    """
    match arch.suffix:
        case "":
            fits = arch.capability <= capability
        case "f":
            fits = arch.major == capability[0] and arch.minor <= capability[1]
        case _:
            fits = arch.capability == capability
    return Load.JIT if fits else Load.NONE


def best_load(archs: Texts, capability: tuple[int, int]) -> Load:
    """Return the best way in which an entry of an arch list reaches a device; NONE for no entry."""
    loads = (find_load(parse_arch(arch), capability) for arch in archs)
    return max(loads, default=Load.NONE)


@frozen
class Target:
    """A device profile; ``recipes/targets.toml`` describes the fields."""

    name: str
    title: str
    capability: tuple[int, int]
    native: str
    family: str
    stock: str
    detected: str
    cpu: str
    cuda: str
    glibc: str
    python: str
    unified: bool = False
    bandwidth: int = 0
    hung_watts: int = 0
    memory_floor: float = 0.0
    untried: str = ""

    @property
    def major(self) -> int:
        return self.capability[0]

    @property
    def cuda_tag(self) -> str:
        return f"cu{self.cuda.replace('.', '')}"

    def with_torch(self, torch: str) -> Target:
        """Return the target with the CUDA that a release of torch is built with."""
        return replace(self, cuda=toolkit_of(torch).cuda)

    def arch_list(self, arch: str) -> str:
        """Return TORCH_CUDA_ARCH_LIST for a build; ``arch`` is ``native`` or ``family``."""
        return self.native if arch == "native" else self.family

    def plain_arch(self, arch: str) -> str:
        """Return the arch of a build as nvcc names it, without suffix: ``121`` for ``native``."""
        return replace(parse_arch(self.arch_list(arch)), suffix="", ptx=False).gencode

    def gencode_flags(self, arch_list: str) -> str:
        """Return the -gencode flags that torch's CMake makes of TORCH_CUDA_ARCH_LIST.

        For ``Auto``, they are those that torch detects on the device.
        """
        if arch_list == "Auto":
            return self.detected
        flags = []
        for arch in map(parse_arch, arch_list.replace(";", " ").split()):
            for code in arch.codes:
                flags += ["-gencode", f"arch=compute_{arch.gencode},code={code}"]
        return " ".join(flags)


@cache
def targets() -> dict[str, Target]:
    """Return name → target for all known targets."""
    rows = read_toml(dict[str, Fields], RECIPES / "targets.toml")
    devices = {}
    for name, row in rows.items():
        row["capability"] = parse_arch(row["capability"]).capability
        devices[name] = Target(name=name, **row)
    return devices


def is_unified(name: str | None) -> bool:
    """Return whether CPU and GPU of a device share one memory; False for an unknown device."""
    return name in targets() and targets()[name].unified


@frozen
class Toolkit:
    """A release of CUDA; ``recipes/toolchain.toml`` describes the fields."""

    cuda: str
    torch: str
    nvcc: str
    driver: str
    ptx: tuple[int, int]
    default_codes: Texts


@cache
def toolkits() -> tuple[Toolkit, ...]:
    """Return the releases of CUDA that patchkit has locked, oldest first."""
    return read_toml(tuple[Toolkit, ...], RECIPES / "toolchain.toml", key="toolkit")


@frozen
class PtxasFigures:
    """The limits of one ptxas; ``recipes/toolchain.toml`` describes the fields."""

    memory: tuple[int, int]
    split_memory: tuple[int, int]
    processor: tuple[int, int]
    written: tuple[int, int]
    split_from: int
    split: int


@cache
def ptxas_figures() -> PtxasFigures:
    """Return the limits of a run of ptxas."""
    return read_toml(PtxasFigures, RECIPES / "toolchain.toml", key="ptxas")


def toolkit_of(torch: str) -> Toolkit:
    """Return the CUDA that a release of torch is built with.

    For a torch older than all rows, return the oldest CUDA.
    """
    # Imported here, since nodes also import this module and may lack packaging.
    from packaging.version import Version

    oldest, *later = toolkits()
    fitting = [row for row in later if Version(row.torch) <= Version(torch)]
    return fitting[-1] if fitting else oldest
