"""What a build of vLLM with one torch takes, resolved by uv and locked by hash."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from patchkit.errors import SourceError
from patchkit.source.tree import SourceTree
from patchkit.wheel.vllm.lock_requirements import relock

_MACHINES = ("aarch64", "x86_64")
_PYTHONS = tuple(f"3.{minor}" for minor in range(10, 15))
_HEAD = """\
# Everything that building vLLM with torch {torch} takes, as the package index has it for CPython \
{pythons} on
# aarch64 and x86-64. Written by patchkit.wheel.vllm.lock_requirements.
"""


def lock_for(tree: SourceTree, torch: str) -> str:
    """Return the text of requirements/torch-X.txt, with the newest versions that fit.

    Raises SourceError, with what uv said, if there is no solution.
    """
    project = tomllib.loads(tree.read("pyproject.toml"))
    wanted = "\n".join(project["build-system"]["requires"])
    lowest = SpecifierSet(project["project"]["requires-python"])
    pythons = [each for each in _PYTHONS if lowest.contains(each)]
    found: dict[str, Requirement] = {}
    for machine in _MACHINES:
        for line in _resolved(wanted, machine, pythons[0]):
            requirement = Requirement(line)
            other = found.setdefault(requirement.name, requirement)
            if str(other) != str(requirement):
                raise SourceError(
                    f"torch {torch}: {machine} takes {requirement}, another machine {other}",
                    hint=f"write recipes/vllm/requirements/torch-{torch}.txt by hand",
                )
    head = _HEAD.format(torch=torch, pythons=f"{pythons[0]} to {pythons[-1]}")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "names.txt"
        place.write_text("\n".join([head, *map(str, (found[name] for name in sorted(found))), ""]))
        return relock(place)


def _resolved(wanted: str, machine: str, python: str) -> list[str]:
    command = (
        *(sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet", "--no-header"),
        *("--python-platform", f"{machine}-manylinux_2_28", "--python-version", python),
        *("--no-annotate", "--only-binary=:all:"),
    )
    done = subprocess.run(command, input=wanted, capture_output=True, text=True)
    if done.returncode:
        raise SourceError(f"uv finds no build environment: {done.stderr.strip()}")
    return done.stdout.splitlines()
