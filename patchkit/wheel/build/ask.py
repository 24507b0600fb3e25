"""Questions to another Python, answered in JSON."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from patchkit.errors import HostError


def ask(python: Path, code: str, *arguments: str) -> Any:
    """What ``code`` prints last, in an interpreter that is alone with its own modules.

    Raises HostError, with its last words, if it does not run or does not answer.
    """
    command = [str(python), "-I", "-c", code, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=120
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise HostError(f"{python} does not run: {error}") from error
    if done.returncode:
        raise HostError(f"{python}: {_last(done.stderr) or 'it ended without a word'}")
    return json.loads(_last(done.stdout))


def _last(text: str) -> str:
    return text.strip().rpartition("\n")[2]
