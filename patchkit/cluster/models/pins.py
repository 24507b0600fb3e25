"""Pin a model's commit in ``cluster.toml``: one line is written, all others stay as they are."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from patchkit.durable.atomic import replacing
from patchkit.durable.failure import translated
from patchkit.durable.lock import locked
from patchkit.errors import UsageError
from patchkit.reading import read_text

_PATIENCE = 10.0  # seconds for others that write there
_TABLE = "models"
_HEADER = re.compile(r"\s*\[\s*(?:models|\"models\"|'models')\s*\]\s*(?:#.*)?")
_ANY_HEADER = re.compile(r"\s*\[")


def pin(path: Path, repo: str, commit: str) -> bool:
    """Write the commit of a model into the file; return whether that changed it.

    Raises UsageError if the file is no TOML, or is one that only a person can edit.
    """
    # Whoever pins another model meanwhile would lose one of the two lines.
    with translated(at=path), locked(path.parent, patience=_PATIENCE):
        text = read_text(path)
        changed = pinned(text, repo, commit, str(path))
        if changed == text:
            return False
        with replacing(path) as file:
            file.write(changed.encode())
    return True


def pinned(text: str, repo: str, commit: str, name: str = "cluster.toml") -> str:
    """Return the text of a cluster file in which ``[models]`` pins a commit."""
    try:
        before = tomllib.loads(text)
        held = before.get(_TABLE, {})
        if isinstance(held, dict) and held.get(repo) == commit:
            return text
        changed = _edit_models_table(text, repo, commit)
        # The edit is by lines: only this says that it has done what it should, and nothing else.
        if tomllib.loads(changed) == {**before, _TABLE: {**held, repo: commit}}:
            return changed
    except (tomllib.TOMLDecodeError, TypeError):
        pass
    raise UsageError(
        f"{name}: the commit of {repo} cannot be written into it",
        why="it is not TOML, or its table [models] is written in another way",
        hint=f"write below [{_TABLE}] by hand: {_pin_line(repo, commit)}",
    )


def _edit_models_table(text: str, repo: str, commit: str) -> str:
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    line = f"{_pin_line(repo, commit)}\n"
    start = next((n for n, row in enumerate(lines) if _HEADER.fullmatch(row.rstrip())), None)
    if start is None:
        return "".join([*lines, *(["\n"] if text.strip() else []), f"[{_TABLE}]\n", line])
    quoted_repo = rf"(?:\"{re.escape(repo)}\"|'{re.escape(repo)}')"
    key = re.compile(rf"(\s*{quoted_repo}\s*=\s*)([\"'])[^\"']*\2(.*)", re.DOTALL)
    for number in range(start + 1, len(lines)):
        if _ANY_HEADER.match(lines[number]):
            break
        if match := key.fullmatch(lines[number]):
            lines[number] = f"{match[1]}{json.dumps(commit)}{match[3]}"
            return "".join(lines)
    return "".join([*lines[: start + 1], line, *lines[start + 1 :]])


def _pin_line(repo: str, commit: str) -> str:
    return f"{json.dumps(repo)} = {json.dumps(commit)}"
