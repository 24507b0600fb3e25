"""Read the files that `up` placed on a node, as far as nodes are compared by them. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from patchkit.errors import PatchkitError
from patchkit.runtime.node.env_file import EnvFile, env_file

ENV, GROUP = "node.env", "group.json"
_EXEC = "ExecStart="


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedFiles:
    """A node's part of a start; ``env`` is None where ``trouble`` says why.

    ``words`` is the command of its rank, ``id`` that of the start, "" if ``group.json`` says none.
    """

    id: str
    model: str
    url: str
    words: tuple[str, ...]
    env: EnvFile | None
    trouble: str

    def word_after(self, word: str) -> str:
        """Return what follows a word of the command, "" if it is not there.

        After ``serve`` it is the model; a rank that Ray starts has none.
        """
        return dict(pairwise(self.words)).get(word, "")


def placed_files(files: Mapping[str, str], unit: str) -> PlacedFiles | None:
    """Return what an earlier `up` left, None where there is nothing of one."""
    if not {ENV, GROUP, unit} & files.keys():
        return None
    env, trouble = None, ""
    try:
        env = env_file(files.get(ENV, ""), ENV, accept_edited=True)
    except PatchkitError as error:
        trouble = error.what
    try:
        group = json.loads(files.get(GROUP, ""))
    except (ValueError, RecursionError):
        group = {}
    group = group if isinstance(group, dict) else {}
    return PlacedFiles(
        **{name: str(group.get(name, "")) for name in ("id", "model", "url")},
        words=_command_words(files.get(unit, "")),
        env=env,
        trouble=trouble,
    )


def url_of(placed: PlacedFiles | None, port: int) -> str:
    """Return where a node's server listens: as `up` placed it, else on this port of its own."""
    return placed.url if placed and placed.url else f"http://127.0.0.1:{port}"


def _command_words(unit: str) -> tuple[str, ...]:
    """Return the words of a unit's command, as ``units.unit_line`` wrote them."""
    lines = [line.removeprefix(_EXEC) for line in unit.splitlines() if line.startswith(_EXEC)]
    try:
        words = shlex.split(lines[-1]) if lines else []
    except ValueError:  # a quote without its end: somebody edited it
        return ()
    return tuple(word.replace("%%", "%").replace("$$", "$") for word in words)
