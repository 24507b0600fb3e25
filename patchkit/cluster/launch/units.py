"""Write the files of a start for each node: units, scripts, variables and settings. Pure.

The units are templates in recipes/units; a line whose value is empty is left out. The command of a
rank may run in a container, as the main process of its unit. Files have the same paths there as on
the node. The container is not privileged, and command lines hold no secrets.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from patchkit import foreign, http_exchange
from patchkit.cluster.agent import (
    alive_script,
    group_script,
    judge,
    memory_record,
    memory_script,
    memory_trigger,
    processes,
)
from patchkit.cluster.agent.group_script import ALONE
from patchkit.cluster.agent.image_facts import ImageFacts
from patchkit.cluster.agent.node_facts import PROGRAMS
from patchkit.cluster.agent.node_state import LABEL
from patchkit.cluster.agent.processes import MARK
from patchkit.cluster.launch.cluster_file import ClusterFile, ServeChoices
from patchkit.cluster.launch.ranks import (
    PlannedRank,
    ServedModel,
    absolute,
    model_folders,
)
from patchkit.digests import digest
from patchkit.frozen import Texts, Values, frozen
from patchkit.quoting import quoted
from patchkit.records import RECIPES
from patchkit.runtime.memory.given_flags import given_flags
from patchkit.runtime.memory.plan import CACHE_BYTES, SHARE
from patchkit.runtime.memory.pool import memory_pool
from patchkit.runtime.memory.weights import division_of
from patchkit.runtime.rules.rule import (
    CACHES,
    STACKS,
    cache_folders,
    cache_variables,
)
from patchkit.runtime.serve.command_notes import read_gigabytes
from patchkit.runtime.serve.request import MASTER_PORT, models_url
from patchkit.target import targets
from patchkit.units import BYTES_PER_GIB

SCRIPTS = {
    "group.py": group_script,
    "alive.py": alive_script,
    "memory.py": memory_script,
    "memory_record.py": memory_record,
    "memory_trigger.py": memory_trigger,
    "judge.py": judge,
    "processes.py": processes,
    "http_exchange.py": http_exchange,
    "foreign.py": foreign,
}
"""File name on a node → module, for the scripts that nodes run with the standard library alone."""

# Seconds of a start for any model: kernels that are compiled at the first start, CUDA graphs, the
# rendezvous of the ranks.
_BEFORE_SECONDS = 900
# For each GiB of weights on a node: mapped files on unified memory were reported to load at
# 0.1 GiB/s and less; read ahead they load at 1 GiB/s and more.
_SECONDS_PER_GIB = 12
_MOST_GIB = 120  # weights in a node's memory at most
_HEADER = "# Written by patchkit up; replaced by the next one.\n"
_COMMENT = re.compile("^#.*\n", re.MULTILINE)  # of a template
_INDEX = "index_head_dim"  # in configs of models with sparse attention


def head_ports(serve: ServeChoices) -> dict[int, str]:
    """Return the ports that ranks need at the head's address, each with its purpose."""
    master_port = serve.ranks_port(MASTER_PORT)
    return {master_port: "the rendezvous of the ranks, --master-port"}


@frozen
class GroupUnits:
    """The units of a cluster's ranks, and the files beside them.

    ``links`` are the words of ssh that lead from the head to each worker.
    """

    cluster: ClusterFile
    model: ServedModel
    ranks: tuple[PlannedRank, ...]
    links: tuple[Texts, ...]

    @property
    def url(self) -> str:
        """Return the URL of the server, on the head."""
        request = self.ranks[0].command.request
        return models_url(request).removesuffix("/v1/models")

    def words(self, number: int) -> Texts:
        """Return the words of a rank's command, `vllm serve`."""
        rank = self.ranks[number]
        program, verb, source, *flags = rank.command.words
        if source != self.model.name:
            flags += ["--served-model-name", self.model.name]
        # An image's PATH has its programs.
        if not rank.facts.image:
            program = f"{rank.facts.venv}/bin/{program}"
        return (program, verb, source, *flags, *self.cluster.serve.args)

    def node_files(self) -> Sequence[Values]:
        """Return the files of each node by name, the head's first.

        Each node's ``group.json`` has the id of the start, a digest of all files of all nodes. It
        also has settings for its node alone, among them the digests of the node's files, by which
        `doctor` sees edits.
        """
        numbers = range(len(self.ranks))
        node_files = [self._rank_files(number) for number in numbers]
        content = json.dumps([node_files, self.links, self.url], sort_keys=True)

        settings: dict[str, object] = {
            "id": digest(content)[:16],
            "name": self.cluster.name,
            "unit": self.cluster.unit,
            "nodes": [node.ssh for node in self.cluster.members],
        }

        for number, files in enumerate(node_files):
            group = {**settings}
            if number == 0:
                group |= self._head_settings()
            group |= self._node_settings(self.ranks[number], files)
            files["group.json"] = json.dumps(group, indent=1) + "\n"
        return node_files

    def _head_settings(self) -> dict[str, object]:
        """Return the settings of ``group.json`` that only the head has."""
        workers = {
            str(number): {"node": self.cluster.members[number].ssh, "ssh": words}
            for number, words in enumerate(self.links, start=1)
        }
        folders = cache_folders(CACHES, self.ranks[0].env.node.vllm)

        return {
            "model": self.model.name,
            "url": self.url,
            "workers": workers,
            "frozen": self.cluster.serve.frozen,
            "caches": folders["cache"],
        }

    def _node_settings(self, rank: PlannedRank, files: Values) -> dict[str, object]:
        """Return the settings of ``group.json`` that differ from node to node."""
        device = targets().get(rank.env.node.target)
        flags = given_flags(self.words(self.ranks.index(rank)))
        settings: dict[str, object] = {
            "watts": device.hung_watts if device else 0,
            "floor": self.memory_floor(rank),
            "memory": _rank_memory(rank, flags),
            "cache": _cache_flag(rank, flags),
            "speed": _speed_bytes(rank, flags, device.bandwidth if device else 0),
            "stacks": f"{rank.facts.home}/{STACKS}",
            "folder": absolute(self.model.folder, rank.facts),
            "address": rank.address,
            "modules": " ".join(module.name for module in rank.command.modules),
            "files": {name: digest(content) for name, content in files.items()},
        }

        image = rank.facts.image
        if image:
            # These words run a program in the rank's container.
            inside = [image.program, "exec", f"patchkit-{self.cluster.name}"]
            return {**settings, "inside": inside, "image": image.id}

        # If the link leads elsewhere later, `status` says that another environment was installed.
        link = absolute(self.cluster.venv, rank.facts)
        return {**settings, "venv": rank.facts.venv, "link": link}

    def memory_floor(self, rank: PlannedRank) -> float:
        """Return the GiB below which a rank is ended, 0 for never."""
        floor = self.cluster.serve.memory_floor
        return memory_pool(rank.facts.host, rank.env.node, floor).floor_gib

    def _rank_files(self, number: int) -> dict[str, str]:
        """Return the files of a node by name, without ``group.json``."""
        values = self._unit_values(number)
        common = _read_template("common")
        files = {"node.env": self.ranks[number].text, **node_scripts()}

        for unit, name in self._unit_templates(number).items():
            template = _read_template(name).replace("$common\n", common)
            filled = fill_template(template, values)
            files[unit] = _HEADER + _COMMENT.sub("", filled)
        return files

    def _unit_templates(self, number: int) -> Values:
        """Return the units of a node, each with the name of its template."""
        file = self.cluster
        templates = {file.unit: "worker" if number else "head"}
        if self.memory_floor(self.ranks[number]):
            templates[file.memory_unit] = "memory"
        if number:
            return templates

        if len(self.ranks) > 1:
            templates[file.unit_name("-worker@")] = "watch"
        if file.serve.frozen:
            templates[file.guard_unit] = "alive"
        return templates

    def _unit_values(self, number: int) -> dict[str, object]:
        """Return the values for the templates of a node's units."""
        file = self.cluster
        rank = self.ranks[number]
        count = len(self.ranks)
        frozen = file.serve.frozen
        script = f"/usr/bin/python3 {ALONE} %h/.config/patchkit/{file.name}"

        # A percent sign begins a specifier.
        model = " ".join(self.model.name.split())
        model = model.replace("%", "%%")
        part = f", rank {number} of {count}" if count > 1 else ""
        start_guard = f"-systemctl --user --no-block start {file.guard_unit}"

        # Not by StateDirectory=: systemd before 254 would make it elsewhere.
        vllm = rank.env.node.vllm
        folders = cache_folders(CACHES, vllm, self.model.name)
        variables = cache_variables(f"%h/{CACHES}", vllm, self.model.name)

        return {
            "name": file.name,
            "unit": file.unit,
            "description": f"vLLM {model}{part} (cluster {file.name})",
            "script": script,
            "watched": start_guard if frozen else "",
            "frozen": frozen,
            "frozen_status": alive_script.FROZEN,
            "memory": file.memory_unit if self.memory_floor(rank) else "",
            "before": " ".join(file.watch_units),
            "seconds": self.start_seconds(),
            "mark": f"{MARK}={file.name}",
            "make_state": f"/usr/bin/mkdir -p %h/{folders['graphs']}",
            # Where a rank keeps compiled code.
            "caches": " ".join(f"{name}={value}" for name, value in variables.items()),
            "smaller": group_script.SMALLER,
            **self._run_values(number),
        }

    def start_seconds(self) -> int:
        """Return how many seconds a start may take."""
        count = len(self.ranks)
        command = self.ranks[0].command
        weights = command.request.weights
        gib: float = _MOST_GIB * count

        # A size from a model's name is a lower bound: with it a start could be given up too early.
        if weights and not weights.from_name:
            gib = weights.gib
        return _BEFORE_SECONDS + round(_SECONDS_PER_GIB * gib / count)

    def variables(self, rank: PlannedRank) -> Values:
        """Return the variables of a rank in its environment, as its unit and its file set them."""
        venv = f"{rank.facts.venv}/bin"
        caches = cache_variables(f"{rank.facts.home}/{CACHES}", rank.env.node.vllm)
        settings = {setting.name: setting.value for setting in rank.env.settings}
        return {"PATH": f"{venv}:{PROGRAMS}", **caches, **settings}

    def _run_values(self, number: int) -> Values:
        """Return the values that a container changes."""
        rank = self.ranks[number]
        words = self.words(number)
        values = {
            "env_file": f"%h/.config/patchkit/{self.cluster.name}/node.env",
            "kill_mode": "control-group",
            "path": unit_word(f"PATH={rank.facts.venv}/bin:{PROGRAMS}"),
            "prepare": "",
            "remove": "",
        }

        if rank.facts.image:
            container = Container(
                group=self.cluster.name,
                rank=rank,
                image=rank.facts.image,
                folders=self.model_folders(rank),
            )
            words = container.words(words)
            values = {
                "env_file": "",  # the engine reads the file, not systemd
                "kill_mode": "mixed",  # the engine's program hands signals on to the container
                "path": "",
                "prepare": unit_line(container.prepare),
                "remove": f"-{unit_line(container.remove)}",
            }

        # systemd puts the words of the variable there, none if it is empty.
        command = f"{unit_line(words)} ${group_script.SMALLER}"
        return {"command": command, **values}

    def model_folders(self, rank: PlannedRank) -> Texts:
        """Return the folders that a container needs to read the model and the one that drafts."""
        models = absolute(self.cluster.model_folder, rank.facts)
        mounts = [rank.hub]  # mounted in any case
        for name in model_folders(self.cluster, self.model):
            folder = absolute(name, rank.facts)
            if folder.startswith(f"{models}/"):
                folder = models
            # A snapshot in the Hub's cache links to files beside it: the folder above has both.
            mounts.append(re.sub("(/models--[^/]+)/snapshots/.*", r"\1", folder))
        return tuple(dict.fromkeys(mounts))[1:]


def _rank_memory(rank: PlannedRank, flags: Values) -> dict[str, float]:
    """Return what a rank takes of a shared memory, and what has to be free before, in GiB."""
    plan = rank.command.plan
    if not plan or not plan.pool.shared:
        return {"takes": 0.0, "free": 0.0}

    # With a cache in bytes vLLM wants its share free even for a smaller one.
    free = plan.share_gib if CACHE_BYTES in flags else 0.0
    return {"takes": plan.held_gib, "free": free}


def _cache_flag(
    rank: PlannedRank, flags: Values
) -> tuple[str, float, list[tuple[float, str]]]:
    """Return the flag that sizes a rank's cache, its value, and what it may hold; "" for none.

    That are the bytes for contexts, the longest first, each with the flag for its length.
    """
    # vLLM goes by the share only if there is no size in bytes.
    flag = CACHE_BYTES if CACHE_BYTES in flags else SHARE
    if flag not in flags:
        return "", 0.0, []

    plan = rank.command.plan
    return flag, float(flags[flag]), plan.list_contexts() if plan else [(0.0, "")]


def _speed_bytes(
    rank: PlannedRank, flags: Values, bandwidth: int
) -> tuple[float, float, float]:
    """Return what bounds the speed: a rank's weights for a token, its cache, its bandwidth.

    All are in bytes, 0 if unknown. In a pipeline the ranks read one after the other, so the
    caches of all count.
    """
    division = division_of(flags)
    weights = read_gigabytes(rank.command.request, flags) * 1e9 / division.tensor

    plan = rank.command.plan
    checkpoint = rank.command.request.checkpoint
    cache = 0.0
    # Sparse attention reads a part of the cache.
    if plan and plan.is_whole and checkpoint and _INDEX not in checkpoint.config:
        cache = max(plan.cache_gib, 0.0) * BYTES_PER_GIB
    return weights, cache * division.layer, bandwidth * 1e9


def node_scripts() -> Values:
    """Return the texts of the scripts for a node, by file name.

    They lie side by side there, without patchkit: imports from each other name the files.
    """
    imports = {}
    for name, module in SCRIPTS.items():
        stem = name.removesuffix(".py")
        package, _, module_name = module.__name__.rpartition(".")
        alias = f"from {package} import {module_name} as {stem}\n"
        imports[alias] = f"import {stem}\n"
        imports[f"from {module.__name__} import"] = f"from {stem} import"

    texts = {}
    for name, module in SCRIPTS.items():
        text = Path(str(module.__file__)).read_text(encoding="utf-8")
        for packaged, copied in imports.items():
            text = text.replace(packaged, copied)
        texts[name] = text
    return texts


def _read_template(name: str) -> str:
    return (RECIPES / "units" / f"{name}.service").read_text(encoding="utf-8")


def fill_template(template: str, values: Mapping[str, object]) -> str:
    """Return a template with its values, without the lines in which a value is empty."""
    lines = map(Template, template.splitlines(keepends=True))
    return "".join(
        line.substitute(values)
        for line in lines
        if "" not in map(values.get, line.get_identifiers())
    )


def unit_word(word: str) -> str:
    """Return a word of a unit's command line or assignment, quoted as systemd.syntax(7) says."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    written = "".join(map(_printable_character, escaped))
    is_special = bool(set(word) & set(" \t\"'\\;"))
    if not word or is_special or written != escaped:
        return f'"{written}"'
    return written


def _printable_character(character: str) -> str:
    if character.isprintable():
        return character
    return "".join(f"\\x{byte:02x}" for byte in character.encode())


def unit_line(words: Sequence[str]) -> str:
    """Return words as a command line for ExecStart=, where "$$" stands for a dollar sign."""
    program, *arguments = map(unit_word, words)
    escaped = [word.replace("$", "$$") for word in arguments]
    return " ".join([program, *escaped])


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
        options += [mount(f"{home}/{CACHES}"), mount(self.rank.hub)]

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
            "HF_HOME": self.rank.hub,
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
    def prepare(self) -> Texts:
        """Return the words that remove a former container and make the folders to mount."""
        folders = quoted("mkdir", "-p", self._home, self.rank.hub)
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
