"""Write the command that runs a rank in a container, as the main process of the rank's unit. Pure.

Files have the same paths in the container as on the node. The container is not privileged, and
command lines hold no secrets.
"""

from patchkit.cluster.agent.image_facts import ImageFacts
from patchkit.cluster.agent.node_state import LABEL
from patchkit.cluster.agent.processes import MARK
from patchkit.cluster.launch.ranks import PlannedRank
from patchkit.frozen import Texts, frozen
from patchkit.quoting import quoted
from patchkit.runtime.rules.rule import CACHES, cache_variables

# Variables of the unit or of secrets.env. The engine gets their names alone, and passes on the
# values of those that are set: no secret is in its command line.
_BY_NAME = (
    MARK,
    "PYTHONFAULTHANDLER",
    "VLLM_API_KEY",
    "HF_TOKEN",
)


@frozen
class Container:
    """The container of a rank in the cluster ``group``.

    ``folders`` of the node can be read in the container.
    """

    group: str
    rank: PlannedRank
    image: ImageFacts
    folders: Texts

    @property
    def name(self) -> str:
        return f"patchkit-{self.group}"

    def words(self, command: Texts) -> Texts:
        """Return the words that run a command in the container."""
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

        options += [mount(folder, "readonly") for folder in self.folders]
        options += [mount(f"{home}/{CACHES}"), mount(self._hub)]

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
        """Return the engine's options for the variables that the env file does not set."""
        values = {
            "HOME": self._home,
            "USER": self.rank.facts.user,
            "HF_HOME": self._hub,
        }

        # The unit's variables that say where compiled code is kept.
        caches = cache_variables("", self.rank.env.node.vllm)
        variables = {name: name for name in (*_BY_NAME, *caches)}
        variables |= {name: f"{name}={value}" for name, value in values.items()}

        for setting in self.rank.env.settings:
            variables.pop(setting.name, None)
        return [f"--env={variable}" for variable in variables.values()]

    @property
    def _home(self) -> str:
        """Return the home in the container, which holds the caches that no variable names."""
        return f"{self.rank.facts.home}/{CACHES}/home"

    @property
    def _hub(self) -> str:
        """Return the folder of the Hub's files: HF_HOME of the env file, or its default."""
        for setting in self.rank.env.settings:
            if setting.name == "HF_HOME":
                return setting.value
        return f"{self.rank.facts.home}/.cache/huggingface"

    @property
    def prepare(self) -> Texts:
        """Return the words that remove a former container and make the folders to mount."""
        folders = quoted("mkdir", "-p", self._home, self._hub)
        return ("/bin/sh", "-c", f"{self.remove[-1]}; exec {folders}")

    @property
    def remove(self) -> Texts:
        """Return the words that remove the container, if it outlived the program that ran it."""
        # Usually there is no such container: the engine's error is dropped. podman's first call
        # after a boot leaves a process running, which must not have the cluster's mark.
        removal = quoted(*self.image.remove, self.name)
        return ("/bin/sh", "-c", f"unset {MARK}; {removal} >/dev/null 2>&1")


def mount(folder: str, *flags: str) -> str:
    """Return the option that mounts a folder in a container, at the same path."""
    parts = ["type=bind", f"src={folder}", f"dst={folder}", *flags]
    return "--mount=" + ",".join(map(_csv_field, parts))


def _csv_field(text: str) -> str:
    """Return a text as a field of CSV: the engines read --mount with Go's encoding/csv."""
    if not set(text) & set(',"'):
        return text
    field = text.replace('"', '""')
    return f'"{field}"'
