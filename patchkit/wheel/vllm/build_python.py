"""Describe the Python of a vLLM build: a locked environment, or one of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from patchkit.process import ask
from patchkit.wheel.file.torch import InstalledTorch, installed_torch, require_torch

_ASK = """\
import importlib.metadata as found, importlib.util, sys
names = sys.argv[1:]
have = {name: found.version(name) for name in names if any(found.Distribution.discover(name=name))}
answer = {
    "python": "%d.%d" % sys.version_info[:2],
    "versions": have,
    "torch": importlib.util.find_spec("torch").origin,
}
"""
# Packages that vLLM's setup.py and CMake run, besides torch.
TOOLS = ("cmake", "jinja2", "ninja", "packaging", "setuptools", "setuptools-rust", "setuptools-scm")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPython:
    """An interpreter that has torch and what else a build runs.

    ``site`` is the folder with torch and NVIDIA's libraries for the CPU that is built for;
    ``facts`` say what decides the wheel: Python, torch, and the requirements or versions behind;
    ``tools`` are the versions of what is run.
    """

    python: Path
    site: Path
    torch: InstalledTorch
    tools: Mapping[str, str]
    facts: Mapping[str, str]

    def check(self, when: str) -> None:
        """Raise BuildError if torch is not what it was, for example one without CUDA."""
        expected = self.torch.version.partition("+")[0]
        require_torch(installed_torch(self.python), expected, self.torch.cuda, when)


def build_python(
    python: Path, torch: str, cuda: str, requirements: str = "", site: Path | None = None
) -> BuildPython:
    """Return the environment of an interpreter, checked for the torch that a release needs.

    ``requirements`` is the digest of the locked file it was made from; without one, the versions
    found in it are the facts. ``site`` has the torch of another CPU, in whose place the interpreter
    has a stand-in. Raises BuildError for another torch, HostError for a Python that does
    not run.
    """
    found = installed_torch(python)
    require_torch(found, torch, cuda, "before the build")
    said = ask(python, _ASK, *TOOLS)
    tools: dict[str, str] = said["versions"]
    facts = {"python": str(said["python"]), "torch": f"{found.version}, CUDA {found.cuda}"}
    how = (
        {"requirements": f"sha256:{requirements}"}
        if requirements
        else {"packages": ", ".join(f"{name} {version}" for name, version in tools.items())}
    )
    return BuildPython(
        python=python,
        site=site or Path(said["torch"]).parents[1],
        torch=found,
        tools=tools,
        facts=facts | how,
    )
