"""Write the command that runs a rank in a container, as its unit's main process. Pure.

Files have the same paths inside as outside; nothing is privileged, and no secret stands in a
command line.
"""

from __future__ import annotations

import re

from patchkit.cluster.agent.image_facts import ImageFacts
from patchkit.cluster.agent.node_state import LABEL
from patchkit.cluster.agent.processes import MARK
from patchkit.cluster.launch.ranks import PlannedRank
from patchkit.frozen import frozen
from patchkit.quoting import quoted
from patchkit.runtime.rules.variable_rules import CACHES

_SNAPSHOT = re.compile("(/models--[^/]+)/snapshots/.*")
# Variables of the unit or of secrets.env: the engine hands on those that are set, by name.
_BY_NAME = (
    MARK,
    "PYTHONFAULTHANDLER",
    "RAY_ADDRESS",
    "VLLM_API_KEY",
    "HF_TOKEN",
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
)


@frozen
class Container:
    """A container of a rank, or of Ray's head, in the cluster ``group``.

    ``folders`` may be read in it. ``caches`` are variables of the unit for what is compiled; the
    env file goes before them.
    """

    name: str
    group: str
    rank: PlannedRank
    image: ImageFacts
    folders: tuple[str, ...]
    caches: tuple[str, ...]

    def words(
        self,
        command: tuple[str, ...],
        *extra: str,
    ) -> tuple[str, ...]:
        """Return the words of the engine, with ``extra`` options, that run a command."""
        home = self.rank.facts.home
        options = [
            f"--name={self.name}",
            f"--label={LABEL}={self.group}",
            "--network=host",
            "--ipc=host",
            *self._devices(),
            f"--env-file={home}/.config/patchkit/{self.group}/node.env",
            *self._variables(),
        ]

        # A snapshot in the Hub's cache links to files beside it.
        folders = (_SNAPSHOT.sub(r"\1", folder) for folder in self.folders)
        options += [mount(folder, "", "readonly") for folder in folders]
        options += [mount(f"{home}/{CACHES}"), mount(self._hub), *extra]

        if not self.image.wraps:
            options.append("--entrypoint=")
        return (*self.image.run, *options, self.image.id, *command)

    def _devices(self) -> list[str]:
        devices = []
        if self.rank.facts.host.gpus:
            has_cdi = self.image.spec or self.image.program.endswith("podman")
            devices.append("--device=nvidia.com/gpu=all" if has_cdi else "--gpus=all")
        if self.image.infiniband:
            devices.append("--device=/dev/infiniband")
        return devices

    def _variables(self) -> list[str]:
        """Return the options for variables that the env file does not set."""
        values = {
            "HOME": self._home,
            "USER": self.rank.facts.user,
            "HF_HOME": self._hub,
        }

        variables = {name: name for name in (*_BY_NAME, *self.caches)}
        variables |= {name: f"{name}={value}" for name, value in values.items()}

        for setting in self.rank.env.settings:
            variables.pop(setting.name, None)
        return [f"--env={variable}" for variable in variables.values()]

    @property
    def _home(self) -> str:
        """Return a home that may be written: caches that no variable names are kept there."""
        return f"{self.rank.facts.home}/{CACHES}/home"

    @property
    def _hub(self) -> str:
        for setting in self.rank.env.settings:
            if setting.name == "HF_HOME":
                return setting.value
        return f"{self.rank.facts.home}/.cache/huggingface"

    @property
    def prepare(self) -> tuple[str, ...]:
        """Return the words that remove a former container, and make the folders to be mounted."""
        folders = quoted("mkdir", "-p", self._home, self._hub)
        return ("/bin/sh", "-c", f"{self.remove[-1]}; exec {folders}")

    @property
    def remove(self) -> tuple[str, ...]:
        """Return the words that end a container that outlived its engine's program."""
        # Usually nothing is left; that is not an error. podman's first call after a boot leaves a
        # process running, which must not have the cluster's mark.
        removal = quoted(*self.image.remove, self.name)
        return ("/bin/sh", "-c", f"unset {MARK}; {removal} >/dev/null 2>&1")


def mount(folder: str, at: str = "", *flags: str) -> str:
    """Return the option that gives a container a folder, by default at the path that it has."""
    parts = ["type=bind", f"src={folder}", f"dst={at or folder}", *flags]
    return "--mount=" + ",".join(map(_csv_field, parts))


def _csv_field(text: str) -> str:
    """Return a field of a line of CSV, as Go reads it."""
    if not set(text) & set(',"'):
        return text
    field = text.replace('"', '""')
    return f'"{field}"'
