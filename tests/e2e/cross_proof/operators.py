"""The operators of a wheel's libraries beside those of upstream's wheel of the same release."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from patchkit.target import targets
from patchkit.wheel.device.libraries import library_table

GAPS = tomllib.loads(Path(__file__).with_name("differences.toml").read_text())


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What an extension brought when it was loaded.

    ``operators`` are name → schema and, in brackets, the dispatch keys with a kernel; ``names`` are
    those that Python sees in the module.
    """

    path: str
    operators: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()


def differences(
    ours: Sequence[Loaded], upstream: Sequence[Loaded], facts: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield what is not as in upstream's wheel, and why; "" if nobody explained it.

    ``facts`` are those of our wheel.
    """
    here, there = ({each.path: each for each in side} for side in (ours, upstream))
    for path in sorted(here.keys() | there.keys()):
        if path not in here:
            yield f"{path}: is not built", _explain_library(path, facts)
        elif path not in there:
            yield f"{path}: upstream's wheel has none", ""
        else:
            yield from _compare(here[path], there[path], facts)


def _compare(
    ours: Loaded, upstream: Loaded, facts: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    for name in sorted(ours.operators.keys() | upstream.operators.keys()):
        mine, theirs = (
            ours.operators.get(name, "none"),
            upstream.operators.get(name, "none"),
        )
        if mine != theirs:
            (schema, _, keys), (other, _, more) = (
                each.rpartition(" [") for each in (mine, theirs)
            )
            fewer = schema == other and set(keys[:-1].split()) < set(more[:-1].split())
            gone = mine == "none"
            why = _explain_kernels(name, facts, gone) if gone or fewer else ""
            yield f"{ours.path}: {name} is {mine}, upstream's {theirs}", why
    if names := sorted(set(ours.names) ^ set(upstream.names)):
        yield f"{ours.path}: {', '.join(names)} is in one of the two modules alone", ""


def _explain_library(path: str, facts: Mapping[str, Any]) -> str:
    left_out = {name: facts.get(name) for name in ("extensions", "without")}
    if left_out not in ({"extensions": "all", "without": each} for each in ([], None)):
        return f"left out when it was built: {left_out}"
    name = PurePosixPath(path).name.partition(".")[0]
    known = [gap["why"] for gap in GAPS["library"] if gap["name"] == name]
    version, target = Version(facts["version"]), targets()[facts["target"]]
    entries = [each for each in library_table("vllm").library if each.covers(version)]
    if any(
        fnmatchcase(path, each.file) and not each.used_on(target) for each in entries
    ):
        known.append(f"for other devices than {target.title}")
    return known[0] if known else ""


def _explain_kernels(name: str, facts: Mapping[str, Any], gone: bool) -> str:
    """Return why an operator has no kernel for the device, or is ``gone``."""
    for gap in GAPS["kernels"]:
        if (
            any(fnmatchcase(name, pattern) for pattern in gap["names"])
            and gap.get("declared", True) is not gone
            and targets()[facts["target"]].major not in gap["majors"]
            and SpecifierSet(gap["versions"]).contains(facts["version"])
        ):
            return str(gap["why"])
    return ""
