"""A release of NCCL in the files of a checkout.

    nox -s add-release -- nccl X.Y.Z [--source SOURCE] [--commit C] [--sha256 S] --figures WHERE

SOURCE is a folder, or an archive of the sha256 that is given: its makefile says what it builds, and
its code which variables it reads; without it, both are left for later. WHERE says which two parties
publish the commit or the sha256 and do not copy from each other: a tag proves nothing, it can be
moved. Without it the release is entered without either, as one that nothing verifies.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from patchkit.errors import SourceError
from patchkit.patching.recipe import load_recipe
from patchkit.process import attempt
from patchkit.recipes.nccl.build_files import gencodes, make_flags
from patchkit.records import RECIPES
from patchkit.source.archive import unpack
from patchkit.source.detect import detect
from patchkit.source.releases import RecipeFacts, load_facts
from patchkit.source.resolve import find_origin
from patchkit.target import targets
from tools import run_program
from tools.decisions import Decision, show
from tools.entries import Value, with_nccl_release, with_nccl_torch
from tools.index_entries import described
from tools.nccl_names import with_names
from tools.remote_wheel import requirements

RECIPE = RECIPES / "nccl" / "recipe.toml"
NAMES = RECIPES / "env" / "nccl_variables.tsv"
_FILE = "recipes/nccl/recipe.toml"
_CODE = re.compile(r"arch=compute_\d+,code=(?P<kind>sm|compute)_(?P<number>\d+)")


def enter(arguments: list[str]) -> int:
    """Write what is known of a release; one that is there already stays as it is."""
    parser = argparse.ArgumentParser(prog="add-release nccl", description=__doc__)
    parser.add_argument("version")
    for name in ("source", "commit", "sha256", "figures"):
        parser.add_argument(f"--{name}", default="")
    asked = parser.parse_args(arguments)
    version, facts = asked.version, load_facts("nccl")
    decisions = list(_torches(facts))
    if facts.release(Version(version)):
        return show(decisions)
    fields: dict[str, Value | list[str]] = {"version": version, "tag": f"v{version}-1"}
    if asked.figures:
        known = {name: getattr(asked, name) for name in ("sha256", "commit", "figures")}
        fields |= {name: value for name, value in known.items() if value}
    else:
        decisions.append(_witness(version, facts))
    if asked.source:
        fields["archs"] = _read(asked.source, asked.sha256, version)
    else:
        decisions += _unread(version)
    # Until somebody has looked at its makefiles, the code alone decides about the fixes.
    text = with_nccl_release(
        RECIPE.read_text(encoding="utf-8"), {**fields, "read": False}
    )
    RECIPE.write_text(text, encoding="utf-8")
    decisions.append(
        Decision(file=_FILE, says="read = false until its build files were looked at")
    )
    return show(decisions)


def _torches(facts: RecipeFacts) -> Iterator[Decision]:
    """Enter what each new torch on the index pins."""
    oldest = min(Version(series) for series in facts.torch)
    newest: dict[str, Version] = {}
    for filename, _ in described("torch"):
        try:
            _, version, _, _ = parse_wheel_filename(filename)
        except InvalidWheelFilename:
            continue
        series = f"{version.major}.{version.minor}"
        if (
            Version(series) > oldest
            and series not in facts.torch
            and not version.is_prerelease
        ):
            newest[series] = max(newest.get(series, version), version)
    for series, version in sorted(newest.items(), key=lambda each: each[1]):
        needed = "\n".join(requirements("torch", version.public, "x86_64"))
        if pin := re.search(r"nvidia-nccl-cu\d+==[\d.]+", needed):
            text = with_nccl_torch(RECIPE.read_text(encoding="utf-8"), series, pin[0])
            RECIPE.write_text(text, encoding="utf-8")
            yield Decision(
                file=_FILE, says=f"torch {series} pins {pin[0]}: does `default` move?"
            )


def _witness(version: str, facts: RecipeFacts) -> Decision:
    """Ask for two parties; the tag's own commit is one that may be wrong."""
    # ^{}: the commit behind an annotated tag, not the tag's own object.
    done = attempt(
        "git",
        "ls-remote",
        facts.upstream.git,
        f"refs/tags/v{version}-1^{{}}",
        timeout=60,
    )
    commit = done.output.split()[0] if done.output.split() else "…"
    return Decision(
        file=_FILE,
        says=f"nobody vouches for NCCL {version}: who publishes its commit, or the sha256 of "
        f"{facts.upstream.archive.format(tag=f'v{version}-1')}, independently of the tag?",
        line=f'commit = "{commit}"',
    )


def _read(source: str, sha256: str, version: str) -> list[str]:
    """Enter the variables that the sources read, and return what their makefile builds."""
    origin = find_origin("nccl", source, sha256=sha256 or None)
    if str(origin.version) != version:
        raise SourceError(f"{source} holds NCCL {origin.version}, not {version}")
    with tempfile.TemporaryDirectory() as folder:
        root = (
            origin.path
            if origin.path.is_dir()
            else unpack(origin.path, Path(folder) / "nccl")
        )
        text = with_names(NAMES.read_text(encoding="utf-8"), version, root)
        NAMES.write_text(text, encoding="utf-8")
        flags = gencodes(make_flags(detect(root, "nccl"), targets()["gb10"].cuda))
    return _archs(flags)


def _archs(flags: tuple[str, ...]) -> list[str]:
    """Return archs in the order of the flags, ``12.0+PTX`` for one that has PTX as well."""
    found: dict[str, str] = {}
    for flag in flags:
        if match := _CODE.search(flag):
            arch = f"{match['number'][:-1]}.{match['number'][-1]}"
            found[arch] = (
                f"{arch}+PTX" if match["kind"] == "compute" else found.get(arch, arch)
            )
    return list(found.values())


def _unread(version: str) -> list[Decision]:
    says = f"the sources of {version} were not at hand (--source): "
    return [
        Decision(
            file=_FILE,
            says=f"{says}`archs` is what `make` builds by default with CUDA 13",
        ),
        Decision(
            file="recipes/env/nccl_variables.tsv",
            says=f"{says}its variables are not there",
        ),
    ]


def review(version: str) -> int:
    """Say which bugs are taken to hold for the release as well."""
    bugs = load_recipe("nccl").bugs_of(Version(version))
    says = (
        f"is it so in {version}, which {each.versions} covers: {each.says}"
        for each in bugs
    )
    return show([Decision(file=_FILE, says=each) for each in says])


if __name__ == "__main__":
    steps = {"enter": (enter, sys.argv[2:]), "review": (review, sys.argv[2])}
    run_program(*steps[sys.argv[1]])
