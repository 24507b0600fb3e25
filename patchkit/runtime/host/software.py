"""Find what a Python environment holds and which libnccl it would load; nothing is imported."""

from __future__ import annotations

import os
import re
import shutil
import site
import sys
from collections.abc import Mapping
from pathlib import Path

from patchkit.foreign import read_json
from patchkit.runtime.host.host import Nccl, Software
from patchkit.runtime.python import startup
from patchkit.runtime.python.distributions import find_version, owners
from patchkit.runtime.python.libnccl import nccl_version

# The file of a package that says its version, and the first line of it that does.
_VERSIONS = {"vllm": "_version.py", "torch": "version.py"}
_VERSION = re.compile(
    r"""^__version__\b[^"'\n]*["'](?P<version>\d[^"']*)["']""", re.MULTILINE
)
_OLDEST_CUDA = 13  # of which ptxas knows sm_121a and sm_110a


def software(python: str | None, environment: Mapping[str, str]) -> Software:
    """Return what a Python has installed, None: that of ``find_python``. Raises HostError."""
    python = python or find_python(environment)
    facts = startup.ask_interpreter(python, environment)
    torch = vllm = None
    if facts.torch:
        process = startup.start_process(facts, environment)
        # In this order: torch_choice maps what torch loads.
        torch = _nccl_of_choice(startup.torch_choice(process), facts)
        vllm = (
            _nccl_of_choice(startup.vllm_choice(process), facts) if facts.vllm else None
        )
    return Software(
        python=python,
        vllm=_package_version("vllm", facts.vllm, facts),
        torch=_package_version("torch", facts.torch, facts),
        # The second one beside nightly builds of torch.
        triton=find_version(facts.path, "triton", "pytorch_triton"),
        transformers=find_version(facts.path, "transformers"),
        ray=find_version(facts.path, "ray"),
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
    if any(
        Path(folder, "vllm", "__init__.py").is_file()
        for folder in site.getsitepackages()
    ):
        return sys.executable  # patchkit is installed beside it
    path = environment.get("PATH")
    return (
        shutil.which("python3", path=path)
        or shutil.which("python", path=path)
        or sys.executable
    )


def find_ptxas(root: Path, environment: Mapping[str, str]) -> str:
    """Return the ptxas below ``root`` of a CUDA toolkit that knows these GPUs; "" for none."""
    # Relative, since `root` / an absolute path would lead out of the root.
    home = environment.get("CUDA_HOME", "").lstrip("/")
    known = [root / home] if home else []
    versioned = sorted((root / "usr/local").glob("cuda-*"), reverse=True)
    for place in (*known, root / "usr/local/cuda", *versioned):
        try:
            # NVIDIA's toolkits have this file.
            found = read_json((place / "version.json").read_text(encoding="utf-8"))
            major = int(found["cuda"]["version"].partition(".")[0])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if major >= _OLDEST_CUDA and (place / "bin" / "ptxas").is_file():
            return f"/{place.relative_to(root)}/bin/ptxas"
    return ""


def _package_version(
    package: str, origin: str | None, facts: startup.InterpreterFacts
) -> str:
    """Return a package's version: by the distribution beside it, itself, or any distribution."""
    if origin is None:
        return ""
    home = Path(origin).parent
    place = home / _VERSIONS[package]
    text = (
        place.read_text(encoding="utf-8", errors="replace") if place.is_file() else ""
    )
    match = _VERSION.search(text)
    beside = find_version([str(home.parent)], package)
    return beside or (match["version"] if match else find_version(facts.path, package))


def _nccl_of_choice(choice: startup.Choice, facts: startup.InterpreterFacts) -> Nccl:
    """Return a choice with its version: the file's, else its package's, which may be another."""
    version = ""
    if choice.path:
        place = os.path.realpath(choice.path)
        version = nccl_version(Path(place))
        if not version and (known := owners(facts.path, startup.STEM).get(place)):
            version = known[0].version
    return Nccl(path=choice.path or "", version=version, why=choice.why)
