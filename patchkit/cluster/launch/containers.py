"""Write the command that runs a rank in a container, as its unit's main process. Pure.

Files lie where they lie outside; nothing is privileged, and no secret stands in a command line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from patchkit.cluster.agent.image_facts import ImageFacts
from patchkit.cluster.agent.node_state import LABEL
from patchkit.cluster.agent.processes import MARK
from patchkit.cluster.launch.ranks import PlannedRank
from patchkit.quoting import quoted
from patchkit.runtime.rules.variable_rules import CACHES

_SNAPSHOT = re.compile("(/models--[^/]+)/snapshots/.*")
# What the unit has from itself or from secrets.env is handed on by its name, if it is set.
_BY_NAME = (
    *(MARK, "PYTHONFAULTHANDLER", "RAY_ADDRESS"),
    *("VLLM_API_KEY", "HF_TOKEN", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container of a rank, or of Ray's head, in the cluster ``group``.

    ``folders`` may be read in it, and ``caches`` are variables of the unit for what is compiled;
    one in the env file goes before them.
    """

    name: str
    group: str
    rank: PlannedRank
    image: ImageFacts
    folders: tuple[str, ...]
    caches: tuple[str, ...]

    def words(self, command: tuple[str, ...], *more: str) -> tuple[str, ...]:
        """Return the words of the engine, with ``more`` options, that run a command."""
        home, written = self.rank.facts.home, {it.name for it in self.rank.env.settings}
        by_name = [name for name in (*_BY_NAME, *self.caches) if name not in written]
        values = {
            "HOME": self._home,
            "USER": self.rank.facts.user,
            "HF_HOME": self._hub,
        }
        gpus = ("--device=nvidia.com/gpu=all",)
        if not (self.image.spec or self.image.program.endswith("podman")):
            gpus = ("--gpus=all",)
        return (
            *self.image.run,
            *(f"--name={self.name}", f"--label={LABEL}={self.group}"),
            *("--network=host", "--ipc=host"),
            *(gpus if self.rank.facts.host.gpus else ()),
            *(("--device=/dev/infiniband",) if self.image.infiniband else ()),
            f"--env-file={home}/.config/patchkit/{self.group}/node.env",
            *(f"--env={name}" for name in by_name),
            *(
                f"--env={name}={value}"
                for name, value in values.items()
                if name not in written
            ),
            # A snapshot in the Hub's cache links to what lies beside it.
            *(mount(_SNAPSHOT.sub(r"\1", it), "", "readonly") for it in self.folders),
            *(mount(folder) for folder in (f"{home}/{CACHES}", self._hub)),
            *more,
            *(() if self.image.wraps else ("--entrypoint=",)),
            *(self.image.id, *command),
        )

    @property
    def _home(self) -> str:
        """Return a home that may be written: caches that no variable names are kept there."""
        return f"{self.rank.facts.home}/{CACHES}/home"

    @property
    def _hub(self) -> str:
        chosen = (it.value for it in self.rank.env.settings if it.name == "HF_HOME")
        return next(chosen, f"{self.rank.facts.home}/.cache/huggingface")

    @property
    def prepare(self) -> tuple[str, ...]:
        """Return the words that remove what an engine may have kept, and make what is mounted."""
        folders = quoted("mkdir", "-p", self._home, self._hub)
        return ("/bin/sh", "-c", f"{self.remove[-1]}; exec {folders}")

    @property
    def remove(self) -> tuple[str, ...]:
        """Return the words that end what goes on without its engine's program in the foreground."""
        # Mostly there is none, which is no error to be read in a journal. What podman's first call
        # after a boot leaves running is no process of the cluster's.
        removed = quoted(*self.image.remove, self.name)
        return ("/bin/sh", "-c", f"unset {MARK}; {removed} >/dev/null 2>&1")


def mount(folder: str, at: str = "", *more: str) -> str:
    """Return the option that gives a container a folder, by default at the path that it has."""
    parts = ["type=bind", f"src={folder}", f"dst={at or folder}", *more]
    # A line of CSV, as Go reads it.
    quotes = [it.replace('"', '""') for it in parts]
    return "--mount=" + ",".join(
        f'"{it}"' if set(it) & set(',"') else it for it in quotes
    )
