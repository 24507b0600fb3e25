"""Ask a Python for its environment, by running it; none of the packages in it is imported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from patchkit import process
from patchkit.errors import HostError
from patchkit.records import RecordError, record

_SCRIPT = Path(__file__).with_name("interpreter_facts.py")
_HINT = "name the Python of vLLM with --python, for example venv/bin/python"
_CUDA = re.compile(r"""^cuda\b[^=]*=\s*["'](?P<version>[\d.]+)["']""", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class InterpreterFacts:
    """The answer of ``interpreter_facts``: paths, libraries in the loader's order, packages found.

    ``provider`` is the library whose ``ncclGetVersion`` everybody gets, ``asked`` the one that the
    loader finds for the name that vLLM asks for.
    """

    executable: str
    version: str
    path: tuple[str, ...]
    torch: str | None
    vllm: str | None
    mapped: tuple[str, ...]
    provider: str | None
    asked: str | None

    @property
    def torch_home(self) -> Path:
        assert self.torch is not None
        return Path(self.torch).parent

    @property
    def cuda(self) -> str:
        """Return the CUDA that torch is built for, "" for a build without it."""
        place = self.torch_home / "version.py"
        text = place.read_text(encoding="utf-8", errors="replace") if place.is_file() else ""
        match = _CUDA.search(text)
        return match["version"] if match else ""


def ask_interpreter(python: str, environment: Mapping[str, str]) -> InterpreterFacts:
    """Start a Python with these variables. Raises HostError."""
    code = _SCRIPT.read_text(encoding="utf-8")
    # Not isolated: variables, .pth files and sitecustomize decide what vLLM would load.
    answer = process.ask(python, code, env=environment, isolated=False, timeout=60, hint=_HINT)
    try:
        return record(InterpreterFacts, answer)
    except RecordError as error:
        raise HostError(f"{python}: odd answer: {error}", hint=_HINT) from None
