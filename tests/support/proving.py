"""What the long proofs of wheels have in common."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from patchkit.errors import ProofError

_SHOWN = 1500  # characters of what a command said


def files(folder: Path) -> set[str]:
    """Every file below a folder; of caches not, which Python writes as it likes."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {name for name in names if "__pycache__" not in name}


def require(held: bool, what: str) -> None:
    if not held:
        raise ProofError(what)


def run(*command: str, env: Mapping[str, str] | None = None) -> str:
    """What a command says. Raises ProofError, with its last words, if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[-_SHOWN:]
        raise ProofError(f"{' '.join(command[:5])} … ended with {done.returncode}:\n{said}")
    return done.stdout
