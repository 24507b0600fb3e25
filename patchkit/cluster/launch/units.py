"""Write the units of a cluster's ranks, and what ties them together. Pure.

The units are templates in recipes/units; a line whose value is empty is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from patchkit.cluster.agent import group_script
from patchkit.cluster.agent.unit_state import MARK
from patchkit.paths import RECIPES

SCRIPT = Path(group_script.__file__)
BURST = 4  # starts in an hour: unlimited ones have driven Sparks into a physical reset
RAY_SECONDS = 120  # for Ray's head to listen: measured are 6 on two slow cores
ASK_AGAIN = 20  # seconds between two starts
STOP = 30  # seconds for a rank to end by itself: with a request under way vLLM did not in 60
_PROGRAMS = "/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin"
_HEADER = "# Written by patchkit up; replaced by the next one.\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUnit:
    """What a node runs: ``words`` is the command, ``env`` the text of its variables.

    ``ray`` is its `ray start`, where Ray starts the ranks: all that a worker runs then. ``seconds``
    is how long a start may take.
    """

    node: str
    words: tuple[str, ...]
    env: str
    bin: str
    seconds: int
    ray: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUnits:
    """A cluster's ranks, the head first: its name, what it serves, where it is asked.

    ``links`` are the words of ssh from the head to each worker, by rank from 1; ``ray`` is where
    Ray's head listens, "" without one.
    """

    name: str
    model: str
    url: str
    ranks: tuple[RankUnit, ...]
    links: tuple[tuple[str, ...], ...] = ()
    ray: str = ""

    @property
    def unit(self) -> str:
        return f"patchkit-{self.name}.service"

    def node_files(self) -> list[dict[str, str]]:
        """Return the files of each node by name, the head's first.

        Each node's ``group.json`` has the same id: a digest of all files of all nodes.
        """
        bare = [dict(self._rank_files(rank)) for rank in range(len(self.ranks))]
        text = json.dumps([bare, self.links, self.url], sort_keys=True)
        group = hashlib.sha256(text.encode()).hexdigest()[:16]
        return [
            files | {"group.json": self._group_json(group, rank)} for rank, files in enumerate(bare)
        ]

    def _rank_files(self, rank: int) -> Iterator[tuple[str, str]]:
        own, values = self.ranks[rank], self._unit_values(rank)
        yield "group.py", SCRIPT.read_text(encoding="utf-8")
        yield "node.env", own.env
        yield self.unit, _fill_unit("worker" if rank else "head", values)
        if rank == 0 and len(self.ranks) > 1:
            yield self._watch_unit(""), _fill_unit("watch", values)
        if rank == 0 and self.ray:
            yield values["ray_unit"], _fill_unit("ray", values | {"command": unit_line(own.ray)})

    def _unit_values(self, rank: int) -> dict[str, str]:
        """Return what stands for the names in the templates."""
        own, count = self.ranks[rank], len(self.ranks)
        ray_unit = f"patchkit-{self.name}-ray.service" if self.ray else ""
        before = [ray_unit, *(self._watch_unit(str(number)) for number in range(1, count))]
        # A percent sign begins a specifier.
        model = " ".join(self.model.split()).replace("%", "%%")
        part = f", rank {rank} of {count}" if count > 1 else ""
        return {
            "name": self.name,
            "unit": self.unit,
            "description": f"vLLM {model}{part} (cluster {self.name})",
            "command": unit_line(own.words),
            "script": f"/usr/bin/python3 -I %h/.config/patchkit/{self.name}/group.py",
            "before": " ".join(before).strip(),
            "seconds": str(own.seconds),
            "burst": str(BURST),
            "pause": str(ASK_AGAIN),
            "stop": str(STOP),
            "watch_stop": str(STOP + 30),
            "path": unit_word(f"PATH={own.bin}:{_PROGRAMS}"),
            "mark": unit_word(f"{MARK}={self.name}"),
            "ray_unit": ray_unit,
            "ray_address": f"RAY_ADDRESS={self.ray}" if self.ray else "",
            "ray_signal": "SIGKILL" if self.ray else "",
            "ray_seconds": str(RAY_SECONDS),
        }

    def _watch_unit(self, rank: str) -> str:
        """Return the unit on the head that has a worker's rank started, watched and stopped."""
        return f"patchkit-{self.name}-worker@{rank}.service"

    def _group_json(self, group: str, rank: int) -> str:
        content: dict[str, object] = {"id": group, "name": self.name, "unit": self.unit}
        if rank == 0:
            content |= {
                "model": self.model,
                "url": self.url,
                **({"ray": self.ray} if self.ray else {}),
                "workers": {
                    str(number): {"node": self.ranks[number].node, "ssh": list(words)}
                    for number, words in enumerate(self.links, start=1)
                },
            }
        return json.dumps(content, indent=1) + "\n"


def _fill_unit(name: str, values: Mapping[str, str]) -> str:
    """Return the file of a unit from its template, without the template's comments."""
    template = (line for line in _template_lines(name) if not line.startswith("#"))
    filled = [Template(line).substitute(values) for line in template]
    return _HEADER + "".join(line for line in filled if line.partition("=")[2] != "\n")


def _template_lines(name: str) -> Iterator[str]:
    text = (RECIPES / "units" / f"{name}.service").read_text(encoding="utf-8")
    for line in text.splitlines(keepends=True):
        if line == "$common\n":
            yield from _template_lines("common")
        else:
            yield line


def unit_word(word: str) -> str:
    """Return a word of a unit's command line or assignment, quoted as systemd.syntax(7) says."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    kept = "".join(
        c if c.isprintable() else "".join(f"\\x{b:02x}" for b in c.encode()) for c in escaped
    )
    return f'"{kept}"' if not word or set(word) & set(" \t\"'\\;") or kept != escaped else kept


def unit_line(words: Sequence[str]) -> str:
    """Return a command line for ExecStart: in it a dollar sign begins a variable."""
    first, *rest = words
    return " ".join([unit_word(first), *(unit_word(each).replace("$", "$$") for each in rest)])
