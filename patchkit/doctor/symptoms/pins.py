"""Judge a fault of a package's version by what the release of vLLM requires of the package."""

import re
from collections.abc import Mapping
from functools import cache

from patchkit.doctor.symptoms.symptom import Cause, filled_cause
from patchkit.frozen import Values, frozen
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.rules.releases import read_table, release, within
from patchkit.runtime.rules.rule import Situation

PINS = RECIPES / "vllm" / "pins.tsv"
FITS = "as-pinned"
"""The cause whose package is the one that vLLM requires."""

NO_RELEASE = "release-unknown"
"""The cause whose release of vLLM is not known."""

_NAME = re.compile(r"[\w.-]+(?:\[.*?\])?")
_NO_NUMBER = re.compile(r"\.(?:post|dev)\d+|\.\*")


@frozen
class Package:
    """A package; the head of packages.toml describes the fields."""

    name: str
    fault: str
    frame: str = "(?!)"


@frozen
class PackageFile:
    """The packages, and the causes of a fault of a version, by how it is judged."""

    package: tuple[Package, ...]
    cause: Mapping[str, Values]


@cache
def package_file() -> PackageFile:
    """Return the content of recipes/doctor/packages.toml."""
    return read_toml(PackageFile, RECIPES / "doctor" / "packages.toml")


def pinned_cause(text: str, frames: str, facts: Situation) -> Cause | None:
    """Return the cause of a call into a package that fails; None if the texts name no package."""
    package = _package_at_fault(text, frames)
    if package is None:
        return None

    vllm = facts.get("vllm", "0")
    table = read_table(PINS)
    pin = ""
    if release(vllm) >= table.oldest:
        pin = table.at(vllm).get(package.name, "")

    installed = facts.get(package.name, "")
    judged = _judge(installed, pin)
    values = {
        "package": package.name,
        "pin": pin,
        "installed": installed,
        "vllm": vllm,
    }
    return filled_cause(package_file().cause[judged], values)


def _package_at_fault(text: str, frames: str) -> Package | None:
    rows = package_file().package
    named = [row for row in rows if re.search(row.fault, text)]
    calling = [row for row in rows if re.search(row.frame, frames)]
    return next(iter(named + calling), None)


def _judge(installed: str, pin: str) -> str:
    """Return how an installed version stands to a requirement, as packages.toml names it."""
    if not pin:
        return "no-release"
    if not installed:
        return "unknown"

    bounds = _NAME.sub("", pin, count=1).replace("~=", ">=")
    bounds = _NO_NUMBER.sub("", bounds)
    return "fits" if within(installed, bounds) else "differs"
