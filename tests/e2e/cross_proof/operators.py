"""The operators of a wheel's libraries beside those of upstream's wheel of the same release."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from patchkit.recipes.vllm.build import known_externals
from patchkit.records import read_toml
from patchkit.target import Target, targets
from patchkit.wheel.device.libraries import library_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What an extension brought when it was loaded.

    ``operators`` are name → schema and, in brackets, the dispatch keys with a kernel; ``names`` are
    those that Python sees in the module. ``error`` says why it could not be loaded.
    """

    path: str
    operators: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that is not as in upstream's wheel; ``why`` is empty if nobody explained it."""

    what: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownLibraryGap:
    """A library that is never built; described in ``differences.toml``."""

    name: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKernelGap:
    """Operators without kernels for a device; described in ``differences.toml``."""

    names: tuple[str, ...]
    majors: tuple[int, ...]
    versions: str
    why: str
    declared: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownGaps:
    """The tables of ``differences.toml``."""

    library: tuple[KnownLibraryGap, ...]
    kernels: tuple[KnownKernelGap, ...]


@cache
def known_gaps() -> KnownGaps:
    return read_toml(KnownGaps, Path(__file__).with_name("differences.toml"))


def differences(
    ours: Sequence[Loaded], upstream: Sequence[Loaded], facts: Mapping[str, Any]
) -> Iterator[Difference]:
    """Compare libraries of one path with each other; ``facts`` are those of our wheel."""
    here, there = ({each.path: each for each in side} for side in (ours, upstream))
    for path in sorted(here.keys() | there.keys()):
        if path not in here:
            yield Difference(what=f"{path}: is not built", why=_left_out(path, facts))
        elif path not in there:
            yield Difference(what=f"{path}: upstream's wheel has none", why="")
        else:
            yield from _differences(here[path], there[path], facts)


def _differences(ours: Loaded, upstream: Loaded, facts: Mapping[str, Any]) -> Iterator[Difference]:
    for name in sorted(ours.operators.keys() | upstream.operators.keys()):
        mine, theirs = ours.operators.get(name, "none"), upstream.operators.get(name, "none")
        if mine != theirs:
            what = f"{ours.path}: {name} is {mine}, upstream's {theirs}"
            gone = mine == "none"
            why = _no_kernels(name, facts, gone) if gone or _fewer_kernels(mine, theirs) else ""
            yield Difference(what=what, why=why)
    if names := sorted(set(ours.names) ^ set(upstream.names)):
        what = f"{ours.path}: {', '.join(names)} is in one of the two modules alone"
        yield Difference(what=what, why="")


def _fewer_kernels(mine: str, theirs: str) -> bool:
    """Check whether the schemas are the same, and kernels of upstream's are missing."""
    (schema, _, keys), (other, _, all_keys) = (each.rpartition(" [") for each in (mine, theirs))
    return schema == other and set(keys[:-1].split()) < set(all_keys[:-1].split())


def _left_out(path: str, facts: Mapping[str, Any]) -> str:
    """Return why a library was not built, "" if nobody knows."""
    name = PurePosixPath(path).name.partition(".")[0]
    named = facts.get("extensions", "all")
    if named != "all" and name not in named:
        return f"only {', '.join(named)} were asked for"
    for known in known_externals():
        its_own = name in known.targets or any(fnmatchcase(path, each) for each in known.installed)
        if known.option in facts.get("without", ()) and its_own:
            return f"--without {known.option}"
    for gap in known_gaps().library:
        if gap.name == name:
            return gap.why
    version, target = _release(facts)
    for entry in library_table().library:
        if entry.covers(version) and fnmatchcase(path, entry.file) and not entry.used_on(target):
            return f"for other devices than {target.title}"
    return ""


def _no_kernels(name: str, facts: Mapping[str, Any], gone: bool) -> str:
    """Return why an operator has no kernel for the device, or is ``gone``; "" if nobody knows."""
    version, target = _release(facts)
    for gap in known_gaps().kernels:
        known = any(fnmatchcase(name, pattern) for pattern in gap.names)
        if (
            known
            and gap.declared is not gone
            and target.major not in gap.majors
            and SpecifierSet(gap.versions).contains(version)
        ):
            return gap.why
    return ""


def _release(facts: Mapping[str, Any]) -> tuple[Version, Target]:
    return Version(facts["version"]), targets()[facts["target"]]
