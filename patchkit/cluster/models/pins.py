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


def pin(path: Path, repo: str, commit: str) -> None:
    """Write the commit of a model into the file.

    Raises UsageError if the file is no TOML, or is one that only a person can edit.
    """
    # Whoever pins another model meanwhile would lose one of the two lines.
    with translated(at=path), locked(path.parent, patience=_PATIENCE):
        text = read_text(path)
        changed = pinned(text, repo, commit, str(path))
        if changed != text:
            with replacing(path) as file:
                file.write(changed.encode())


def pinned(text: str, repo: str, commit: str, name: str = "cluster.toml") -> str:
    """Return the text of a cluster file in which ``[models]`` pins a commit."""
    line = f"{json.dumps(repo)} = {json.dumps(commit)}"
    try:
        before = tomllib.loads(text)
        held = before.get(_TABLE, {})
        if isinstance(held, dict) and held.get(repo) == commit:
            return text
        changed = _edit_models_table(text, repo, line)
        # The edit is by lines: only this says that it has done what it should, and nothing else.
        if tomllib.loads(changed) == {**before, _TABLE: {**held, repo: commit}}:
            return changed
    except (tomllib.TOMLDecodeError, TypeError):
        pass
    raise UsageError(
        f"{name}: the commit of {repo} cannot be written into it",
        why="it is not TOML, or its table [models] is written in another way",
        hint=f"write below [{_TABLE}] by hand: {line}",
    )


def _edit_models_table(text: str, repo: str, line: str) -> str:
    """Put a line into the table: in the place of the model's own, else first."""
    text += "\n" if text and not text.endswith("\n") else ""
    lines = text.split("\n")
    start = next((n for n, row in enumerate(lines) if _HEADER.fullmatch(row)), None)
    if start is None:
        return text + ("\n" if text.strip() else "") + f"[{_TABLE}]\n{line}\n"
    key = re.compile(rf"\s*[\"']{re.escape(repo)}[\"']\s*=\s*([\"'])[^\"']*\1(.*)", re.DOTALL)
    for number in range(start + 1, len(lines)):
        if lines[number].lstrip().startswith("["):
            break
        if match := key.fullmatch(lines[number]):
            return "\n".join([*lines[:number], line + match[2], *lines[number + 1 :]])
    return "\n".join([*lines[: start + 1], line, *lines[start + 1 :]])
