"""Read the files that `up` placed on a node, as far as nodes are compared by them. Pure."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

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
    links: tuple[tuple[str, ...], ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """Return what vLLM gets as its model, "" for a rank that Ray starts."""
        after = dict(pairwise(self.words))
        return after.get("serve", "")

    def flag(self, name: str) -> str:
        """Return what follows a flag, "" if it is not there."""
        return dict(pairwise(self.words)).get(name, "")


def placed_files(files: Mapping[str, str], unit: str) -> PlacedFiles | None:
    """Return what an earlier `up` left, None where there is nothing of one."""
    if not {ENV, GROUP, unit} & files.keys():
        return None
    env, trouble = None, ""
    try:
        env = env_file(files.get(ENV, ""), ENV, accept_edited=True)
    except PatchkitError as error:
        trouble = error.what
    group = _read_group(files.get(GROUP, ""))
    workers = group.get("workers")
    table = workers if isinstance(workers, dict) else {}
    links = [each.get("ssh") for each in table.values() if isinstance(each, dict)]
    return PlacedFiles(
        id=str(group.get("id", "")),
        model=str(group.get("model", "")),
        url=str(group.get("url", "")),
        words=_command_words(files.get(unit, "")),
        env=env,
        trouble=trouble,
        links=tuple(tuple(map(str, each)) for each in links if isinstance(each, list)),
        files=files,
    )


def url_of(placed: PlacedFiles | None, port: int) -> str:
    """Return where a node's server listens: as `up` placed it, else on this port of its own."""
    return placed.url if placed and placed.url else f"http://127.0.0.1:{port}"


def start_id(nodes: Sequence[PlacedFiles]) -> str:
    """Return the id of these files of all nodes, the head's first, as ``units`` makes it."""
    bare = [{k: text for k, text in each.files.items() if k != GROUP} for each in nodes]
    text = json.dumps([bare, nodes[0].links, nodes[0].url], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read_group(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _command_words(unit: str) -> tuple[str, ...]:
    """Return the words of a unit's command, as ``units.unit_line`` wrote them."""
    lines = [line.removeprefix(_EXEC) for line in unit.splitlines() if line.startswith(_EXEC)]
    try:
        words = shlex.split(lines[-1]) if lines else []
    except ValueError:  # a quote without its end: somebody edited it
        return ()
    return tuple(each.replace("%%", "%").replace("$$", "$") for each in words)
