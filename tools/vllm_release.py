"""A release of vLLM in the files of a checkout: entered, and looked at once the tables have it.

    python -m tools.vllm_release enter X.Y.Z     locks, pins, needs, torch, and the list of releases
    python -m tools.vllm_release review X.Y.Z    proves the plans; says what a person has to look at

tools/add_release.py runs both on a copy of the checkout.
"""

from __future__ import annotations

import fnmatch
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from patchkit.errors import PatchkitError
from patchkit.patching.recipe import load_recipe, load_support
from patchkit.recipes.vllm.build import known_externals, recorded_needs
from patchkit.recipes.vllm.external import External, externals
from patchkit.records import RECIPES
from patchkit.runtime.rules.releases import read_table
from patchkit.source.detect import detect
from patchkit.source.releases import LockEntry, read_lock, read_wheel_lock
from patchkit.source.tree import SourceTree
from patchkit.wheel.device.libraries import library_table
from patchkit.wheel.file.torch import torch_of
from tools import run_program
from tools.build_requirements import lock
from tools.decisions import Decision, show
from tools.entries import (
    with_nccl_torch,
    with_needs,
    with_pin,
    with_releases,
    with_span,
)
from tools.gates import find_gates, judge, read_libraries
from tools.index_entries import lock_entries, render_lock, wheel_entries
from tools.model_recipes import undecided, without_preset
from tools.regenerate import ROOT, plan
from tools.release_pins import enter_pins
from tools.remote_wheel import members, requirements
from tools.seen import MODES, pristine
from tools.stated_needs import stated_needs
from tools.tables import FLAGS, STOCK, VARIABLES, read_rows
from tools.toolkit_entries import enter_toolkit

VLLM = RECIPES / "vllm"
NCCL = RECIPES / "nccl" / "recipe.toml"
FLASHINFER = RECIPES / "flashinfer" / "lock.toml"
BUILD = VLLM / "build.toml"
README = ROOT / "README.md"
_CPUS = ("aarch64", "x86_64")
_RULES = ("rules.toml", "flags.toml", "presets.toml", "values.toml")
# What was read by a person in the release before, and what follows from it.
_READ = {
    "vllm/v1/executor/ray_env_utils.py": "recipes/env/rules.toml, the [[executor]] tables",
    "vllm/ray/ray_env.py": "recipes/env/rules.toml, the [[executor]] tables",
    "rust-toolchain.toml": "recipes/vllm/build.toml, rust of [[needs]]",
}


def enter(version: str) -> int:
    """Write what the index and the release's files say; return 1 if a person is needed first."""
    _lock(version)
    with tempfile.TemporaryDirectory() as folder:
        tree = detect(pristine(version, Path(folder)), "vllm")
        _lock_flashinfer(tree)
        decisions = [*_pins(tree, version), *_needs(tree, version)]
    place, recipe = VLLM / "recipe.toml", load_recipe("vllm")
    known = {*recipe.releases, Version(version)}
    _edit(place, with_releases(place.read_text(encoding="utf-8"), [*map(str, known)]))
    enter_pins(version)
    supported = [str(each) for each in sorted(known) if not recipe.facts.refusal(each)]
    _edit(README, with_span(README.read_text(encoding="utf-8"), supported))
    return show(decisions)


def _edit(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _lock(version: str) -> None:
    """Enter the sdist and the wheels, by what the index says of them."""
    sdists, wheels = VLLM / "lock.toml", VLLM / "wheels.toml"
    _edit(
        sdists,
        render_lock(
            _others(read_lock(sdists), version) + lock_entries("vllm", [version])
        ),
    )
    by_cpu = read_wheel_lock(wheels)
    # One wheel may be for several CPUs, and is one entry.
    kept = {
        each.filename: each
        for lock in by_cpu.values()
        for each in _others(lock, version)
    }
    entries = [*kept.values(), *wheel_entries("vllm", [version], _CPUS)]
    _edit(wheels, render_lock(entries, "wheel"))


def _lock_flashinfer(tree: SourceTree) -> None:
    """Enter the sdist of the FlashInfer that a release pins, if its lock lacks it."""
    known = read_lock(FLASHINFER)
    text = tree.read("requirements/cuda.txt")
    for version in re.findall(r"^flashinfer-python==(\S+)", text, re.MULTILINE):
        if version not in known:
            added = lock_entries("flashinfer-python", [version])
            _edit(FLASHINFER, render_lock([*known.values(), *added]))


def _others(lock: dict[str, LockEntry], version: str) -> list[LockEntry]:
    return [entry for known, entry in lock.items() if known != version]


def _pins(tree: SourceTree, version: str) -> Iterator[Decision]:
    """Enter what the release fetches at another commit; a tag names none for certain."""
    known = {each.name: each for each in known_externals()}
    for external in externals(tree):
        name = external.name
        if name not in known:
            yield _new_source(external, version)
            continue
        pin = known[name].pin_of(Version(version))
        if pin is None or (pin.url, pin.pin) != (external.url, external.pin):
            if external.is_commit:
                _edit(
                    BUILD,
                    with_pin(BUILD.read_text(encoding="utf-8"), version, external),
                )
                continue
            yield _tag(external, version)
        elif not external.is_commit and not pin.commit:
            yield _tag(external, version)


def _tag(external: External, version: str) -> Decision:
    return Decision(
        file="recipes/vllm/build.toml",
        says=f"{external.where} fetches {external.name} by the tag {external.pin}, which can be "
        "moved: find its commit, in two places that do not copy from each other",
        line=f'{{ from = "{version}", pin = "{external.pin}", commit = "…", vouched = "…" }},',
        needed=True,
    )


def _new_source(external: External, version: str) -> Decision:
    return Decision(
        file="recipes/vllm/build.toml",
        says=f"{external.where} fetches {external.name} from {external.url}, which no release did: "
        "an [[external]] with its files, targets and devices, and what it costs to leave it out",
        line=f'pins = [{{ from = "{version}", pin = "{external.pin}" }}]',
        needed=True,
    )


def _needs(tree: SourceTree, version: str) -> Iterator[Decision]:
    """Enter what the build takes differently, and a torch that is new."""
    recorded = asdict(recorded_needs(Version(version)))
    needs = tomllib.loads(BUILD.read_text(encoding="utf-8"))["needs"]
    stated = stated_needs(tree)
    changed = {
        name: stated[name]
        for name in recorded
        if stated.get(name, recorded[name]) != recorded[name]
    }
    if changed:
        _edit(BUILD, with_needs(BUILD.read_text(encoding="utf-8"), version, changed))
    torch = stated["torch"]
    if torch not in {each.get("torch") for each in needs}:
        yield from _torch(tree, torch)


def _torch(tree: SourceTree, torch: str) -> Iterator[Decision]:
    """Enter a torch: its CUDA by machine, its NCCL, and what a build with it takes."""
    found = {cpu: requirements("torch", torch, cpu) for cpu in reversed(_CPUS)}
    cuda = {cpu: _cuda(torch, each, cpu) for cpu, each in found.items()}
    series = ".".join(torch.split(".")[:2])
    pin = re.search(r"nvidia-nccl-cu\d+==([\d.]+)", "\n".join(found["x86_64"]))
    recipe = NCCL.read_text(encoding="utf-8")
    if pin and f'\n"{series}" = ' not in recipe:
        _edit(NCCL, with_nccl_torch(recipe, series, pin[1]))
    if all(has.startswith("13.") for has in cuda.values()):
        yield from enter_toolkit(
            RECIPES / "toolchain.toml", torch, cuda, found["x86_64"]
        )
        place = VLLM / "requirements" / f"torch-{torch}.txt"
        if not place.exists():
            lock(tree.root / "pyproject.toml", place.parent)
    else:
        yield Decision(
            file="recipes/vllm/build.toml",
            says=f"the index has torch {torch} for CUDA {cuda}, so nothing is locked for a build",
        )


def _cuda(torch: str, requires: list[str], cpu: str) -> str:
    """Return the CUDA that a wheel is for, such as 13.0; "" if it is for CPUs alone."""
    there = [
        each
        for each in map(Requirement, requires)
        if each.marker is None
        or each.marker.evaluate(
            {"platform_machine": cpu, "platform_system": "Linux", "extra": ""}
        )
    ]
    if torch_of(Version(torch), map(str, there)).cuda is None:
        return ""
    named = "\n".join(map(str, there))
    match = re.search(
        r"(?:cuda-toolkit|nvidia-cuda-runtime)(?:-cu\d+)?(?:\[.*?\])?==(\d+\.\d+)",
        named,
    )
    return match[1] if match else ""


def review(version: str) -> int:
    """Prove both plans of the release, and return 1 if that fails; say what is to be looked at."""
    recipe = load_recipe("vllm")
    releases = list(map(str, recipe.supported))
    before = releases[max(0, releases.index(version) - 1)]
    with tempfile.TemporaryDirectory() as folder:
        roots = {each: pristine(each, Path(folder)) for each in {version, before}}
        for mode in MODES:
            plan(roots[version], mode)
        read = [
            Decision(file=what, says=f"{path} is not as in {before}")
            for path, what in _READ.items()
            if _text(roots[version] / path) != _text(roots[before] / path)
        ]
        read += _gates(roots[version])
    decisions = [
        *_levels(before, version),
        *_groups(before, version),
        *_names(before, version),
    ]
    recipes = [*undecided(version), *without_preset(version, before)]
    return show([*decisions, *recipes, *read, *_libraries(version)])


def _gates(root: Path) -> Sequence[Decision]:
    """Return the gates that nobody has judged, or that a library has overtaken."""
    try:
        return judge(find_gates(root), read_libraries(root)[1]).decisions
    except PatchkitError as error:  # the release is entered all the same
        return [
            Decision(
                file="recipes/vllm/gates.toml", says=f"gates are not read: {error}"
            )
        ]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _levels(before: str, version: str) -> Iterator[Decision]:
    for fix, modes in load_support("vllm").items():
        for mode, row in modes.items():
            if row[before] != row[version]:
                yield Decision(
                    file=f"recipes/vllm/fixes/{fix}.py",
                    says=f"{mode}: {row[before]} in {before}, {row[version]} in "
                    f"{version}: is that so, and do `needs` and `upstream` say it?",
                )


def _groups(before: str, version: str) -> Iterator[Decision]:
    """Yield kernel groups that begin or end with the release."""
    for word, end, at in (
        ("new", "since", version),
        ("gone or otherwise", "until", before),
    ):
        for row in read_rows(STOCK):
            if row[end] == at:
                yield Decision(
                    file="recipes/vllm/kernels.toml",
                    says=f"{word}: kernel group {row['group']} ({row['variable']}: "
                    f"{row['archs'] or 'nothing'})",
                )


def _names(before: str, version: str) -> Iterator[Decision]:
    """Yield variables and flags that rules name and the release no longer knows."""
    for table in (VARIABLES, FLAGS):
        rows = read_table(table).rows
        ended = {row.name for row in rows if row.last == before}
        for name in sorted(ended - {row.name for row in rows if row.last == version}):
            yield from _mentions(name, before)


def _mentions(name: str, before: str) -> Iterator[Decision]:
    for file in _RULES:
        lines = (RECIPES / "env" / file).read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", line):
                yield Decision(
                    file=f"recipes/env/{file}:{number}",
                    says=f"{name} is in no release after {before}",
                )


def _libraries(version: str) -> Iterator[Decision]:
    """Yield libraries of the wheels that are not as libraries.toml has them."""
    expected = {
        each.file
        for each in library_table("vllm").library
        if each.covers(Version(version))
    }
    for cpu in _CPUS:
        there = members("vllm", version, cpu)
        strange = [
            f"{path} is not known"
            for path in there
            if path.endswith(".so")
            and not any(fnmatchcase(path, each) for each in expected)
        ]
        missing = [
            f"{each} is not there"
            for each in expected
            if not fnmatch.filter(there, each)
        ]
        for what in sorted(strange + missing):
            yield Decision(
                file="recipes/vllm/libraries.toml", says=f"wheel for {cpu}: {what}"
            )


if __name__ == "__main__":
    run_program({"enter": enter, "review": review}[sys.argv[1]], sys.argv[2])
