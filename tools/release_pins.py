"""Write recipes/vllm/pins.tsv: what each release of vLLM requires of other packages.

    python -m tools.release_pins            every supported release
    python -m tools.release_pins X.Y.Z      that one; the rest of the table stays

The requirements are those of the release's wheel, then those of the torch, the FlashInfer and the
numba that it pins: the first one that names a package counts.
tools/vllm_release.py enters a new release.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache

from packaging.requirements import Requirement
from packaging.version import Version

from patchkit.doctor.symptoms.pins import PINS, package_file
from patchkit.errors import PatchkitError
from patchkit.patching.recipe import load_recipe
from tools import run_program
from tools.remote_wheel import requirements
from tools.tables import kept_rows, render

_CPU = "aarch64"
_SOURCES = ("torch", "flashinfer-python", "numba")
_HEAD = (
    "package, first release, last release, requirement: what each supported release of vLLM, or",
    "the torch, FlashInfer or numba that it pins, requires. Made by tools/release_pins.py.",
)
_LINUX = {
    "platform_machine": _CPU,
    "platform_system": "Linux",
    "sys_platform": "linux",
    "python_version": "3.12",
    "extra": "",
}


def enter_pins(*releases: str) -> None:
    """Write the pins of these releases, of all for none; the others stay."""
    supported = list(map(str, load_recipe("vllm").supported))
    known = sorted({*supported, *releases}, key=Version)
    news = {release: dict(_pins(release)) for release in releases or known}
    PINS.write_text(render(kept_rows(PINS, known, news), _HEAD), encoding="utf-8")


def _pins(release: str) -> Iterator[tuple[str, str]]:
    """Yield the packages that doctor judges, and what a release requires of each."""
    required = _required("vllm", release)
    for source in _SOURCES:
        pinned = re.fullmatch(r"==([\w.]+)", required.get(source, ("", ""))[1])
        if pinned:
            required = {**_required(source, pinned[1]), **required}

    for package in package_file().package:
        spelled, pin = required.get(package.name, ("", ""))
        if pin:
            yield package.name, f"{spelled}{pin}"


@cache
def _required(project: str, version: str) -> dict[str, tuple[str, str]]:
    """Return name → name with extras, and range, of what a wheel requires on Linux."""
    print(project, version, file=sys.stderr)
    try:
        lines = requirements(project, version, _CPU)
    except PatchkitError:
        lines = requirements(project, version, "x86_64")

    required = {}
    for line in lines:
        row = Requirement(line)
        if row.marker is None or row.marker.evaluate(_LINUX):
            name = re.sub("[_.]", "-", row.name).lower()
            extras = f"[{','.join(sorted(row.extras))}]" if row.extras else ""
            required[name] = (f"{name}{extras}", str(row.specifier))

    return required


def main(arguments: list[str]) -> int:
    enter_pins(*arguments)
    return 0


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
