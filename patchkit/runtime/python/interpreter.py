"""A Python environment, asked by running its interpreter without importing what is in it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchkit.errors import HostError
from patchkit.runtime.python.distributions import distributions, header

_SCRIPT = Path(__file__).with_name("interpreter_facts.py")
_MARK = "patchkit:"  # before the answer: a sitecustomize may print, too
_HINT = "name the Python of vLLM with --python, for example venv/bin/python"
_PATIENCE = 60.0  # seconds for a Python to start; sitecustomize may do anything
_CUDA = re.compile(r"""^cuda\b[^=]*=\s*["'](?P<version>[\d.]+)["']""", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What ``python_facts`` prints: paths, libraries in the loader's order, packages found.

    ``provider`` is the library whose ``ncclGetVersion`` everybody gets, ``caller`` the one that
    ctypes is.
    """

    executable: str
    version: str
    path: tuple[str, ...]
    multiarch: str
    caller: str | None
    torch: str | None
    vllm: str | None
    mapped: tuple[str, ...]
    provider: str | None

    @property
    def torch_home(self) -> Path:
        assert self.torch is not None
        return Path(self.torch).parent

    @property
    def cuda(self) -> str:
        """The CUDA that torch is built for, ``""`` for a build without it."""
        place = self.torch_home / "version.py"
        text = place.read_text(encoding="utf-8", errors="replace") if place.is_file() else ""
        match = _CUDA.search(text)
        return match["version"] if match else ""

    def release(self, project: str) -> str:
        """The installed version of a project, ``""`` if it is not installed."""
        homes = distributions(self.path).get(project, ())
        return next((found for home in homes if (found := header(home, "Version"))), "")


def ask(python: str, environment: Mapping[str, str]) -> Facts:
    """Start a Python with these variables. Raises HostError."""
    try:
        done = subprocess.run(
            [python, str(_SCRIPT), _MARK],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
        )
    except OSError as error:
        raise HostError(f"{python}: {error.strerror}", hint=_HINT) from None
    except subprocess.TimeoutExpired:
        raise HostError(f"{python}: did not answer within {_PATIENCE:.0f} s", hint=_HINT) from None
    answers = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not answers:
        words = (done.stderr.strip() or "it printed nothing").splitlines()[-1]
        raise HostError(
            f"{python}: exit code {done.returncode}: {words}",
            why="it is no Python, or a .pth file, sitecustomize or LD_PRELOAD stops it",
            hint=_HINT,
        )
    facts: dict[str, Any] = json.loads(answers[-1].removeprefix(_MARK))
    return Facts(**{**facts, **{key: tuple(facts[key]) for key in ("path", "mapped")}})
