"""The Python of a vLLM build: a locked environment, or one of the user's own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import HostError
from patchkit.wheel.requirements import Torch, check_torch, torch_of

_ASK = """\
import importlib.metadata as found, json, sys
names = sys.argv[1:]
have = {name: found.version(name) for name in names if any(found.Distribution.discover(name=name))}
print(json.dumps({
    "python": "%d.%d" % sys.version_info[:2],
    "versions": have,
}))
"""
# What vLLM's setup.py and CMake run, besides torch.
TOOLS = ("cmake", "jinja2", "ninja", "packaging", "setuptools", "setuptools-rust", "setuptools-scm")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPython:
    """An interpreter that has torch and what else a build runs.

    ``facts`` say what decides the wheel: Python, torch, and the requirements or versions behind.
    """

    python: Path
    torch: Torch
    facts: Mapping[str, str]

    @property
    def prefix(self) -> Path:
        """The virtual environment."""
        return self.python.parents[1]

    def check(self, when: str) -> None:
        """Raise BuildError if torch is not what it was, for example one without CUDA."""
        expected = self.torch.version.partition("+")[0]
        check_torch(torch_of(self.python), expected, self.torch.cuda, when)


def build_python(python: Path, torch: str, cuda: str, requirements: str = "") -> BuildPython:
    """The environment of an interpreter, checked for the torch that a release wants.

    ``requirements`` is the digest of the locked file it was made from; without one, the versions
    that are found are the facts. Raises BuildError for another torch, HostError for what is
    missing.
    """
    said = _ask(python)
    versions = said["versions"]
    if absent := sorted(set(TOOLS) - versions.keys()):
        raise HostError(
            f"{python} has no {', '.join(absent)}",
            why="vLLM's build runs them",
            hint=f"{python} -m pip install {' '.join(absent)}, or leave --python out: patchkit "
            "makes an environment",
        )
    found = torch_of(python)
    check_torch(found, torch, cuda, "before the build")
    facts = {"python": str(said["python"]), "torch": f"{found.version}, CUDA {found.cuda}"}
    how = (
        {"requirements": f"sha256:{requirements}"}
        if requirements
        else {"packages": ", ".join(f"{name} {versions[name]}" for name in TOOLS)}
    )
    return BuildPython(python=python, torch=found, facts=facts | how)


def _ask(python: Path) -> dict[str, dict[str, str]]:
    try:
        done = subprocess.run(
            [str(python), "-c", _ASK, *TOOLS],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise HostError(f"{python} does not run: {error}") from error
    facts: dict[str, dict[str, str]] = json.loads(done.stdout)
    return facts
