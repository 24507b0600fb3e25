"""Write the units of a cluster's ranks, and what ties them together. Pure.

The units are templates in recipes/units; a line whose value is empty is left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from patchkit import foreign, http_exchange
from patchkit.cluster.agent import alive_script, group_script, judge, processes
from patchkit.cluster.agent.group_script import ALONE
from patchkit.cluster.agent.processes import MARK
from patchkit.cluster.launch.cluster_file import ClusterFile, ServeChoices
from patchkit.cluster.launch.containers import Container, mount
from patchkit.cluster.launch.ranks import PlannedRank, ServedModel, absolute
from patchkit.digests import digest
from patchkit.records import RECIPES
from patchkit.runtime.rules.variable_rules import (
    CACHES,
    STACKS,
    cache_folders,
    cache_variables,
)
from patchkit.runtime.serve.listen import models_url
from patchkit.runtime.serve.request import MASTER_PORT
from patchkit.target import targets

SCRIPTS = {
    "group.py": group_script,
    "alive.py": alive_script,
    "judge.py": judge,
    "processes.py": processes,
    "http_exchange.py": http_exchange,
    "foreign.py": foreign,
}
"""Scripts that nodes run with the standard library alone, by their names there."""

RAY_PORT = 6379

_RAY_FILES = "/tmp/ray"  # noqa: S108 - in a container: Ray's own default
# What does not depend on the model's size: kernels that are compiled at the first start, CUDA
# graphs, the rendezvous of the ranks.
_BEFORE_SECONDS = 900
# Of a node's weights: mapped files on unified memory were reported to load at 0.1 GiB/s and less;
# read ahead they load at 1 GiB/s and more.
_SECONDS_PER_GIB = 12
_MOST_GIB = 120  # what a node's memory holds at most
_PROGRAMS = "/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin"
_STATE, _CACHES = CACHES.rsplit("/", 1)
_STATE_SINCE = (
    254  # of systemd: a user's StateDirectory= is below _STATE, before it was ~/.config
)
_HEADER = "# Written by patchkit up; replaced by the next one.\n"


def head_ports(serve: ServeChoices) -> dict[str, dict[int, str]]:
    """Return the ports at the head's address, and for what: by what starts the ranks."""
    rendezvous = "the rendezvous of the ranks, --master-port"
    return {
        "mp": {serve.ranks_port(MASTER_PORT): rendezvous},
        "ray": {serve.ranks_port(RAY_PORT): "Ray's head"},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUnits:
    """The units of a cluster's ranks; ``links`` are words of ssh from the head to each worker."""

    cluster: ClusterFile
    model: ServedModel
    ranks: tuple[PlannedRank, ...]
    links: tuple[tuple[str, ...], ...] = ()

    @property
    def url(self) -> str:
        """Return where the server is asked, on the head."""
        command = self.ranks[0].command
        assert command is not None
        return models_url(command.request).removesuffix("/v1/models")

    @property
    def ray(self) -> str:
        """Return where Ray's head listens, "" where Ray does not start the ranks."""
        head = self.ranks[0]
        return (
            f"{head.address}:{self._ray_port}"
            if head.env.node.executor.name == "ray"
            else ""
        )

    @property
    def _ray_port(self) -> int:
        return self.cluster.serve.ranks_port(RAY_PORT)

    def words(self, number: int, *, ray: bool = False) -> tuple[str, ...]:
        """Return the command of a rank, or of ``ray``; a worker of Ray's has none but that."""
        rank = self.ranks[number]
        # In an image its PATH says where they are.
        programs = "" if rank.facts.image else f"{rank.facts.venv}/bin/"
        if rank.command is not None and not ray:
            program, verb, source, *flags = rank.command.words
            named = (
                ()
                if source == self.model.name
                else ("--served-model-name", self.model.name)
            )
            first = f"{programs}{program}"
            return (first, verb, source, *flags, *named, *self.cluster.serve.args)
        place = (
            (f"--address={self.ray}",)
            if number
            else ("--head", f"--port={self._ray_port}")
        )
        address = f"--node-ip-address={rank.address}"
        return (f"{programs}ray", "start", "--block", address, *place)

    def node_files(self) -> list[dict[str, str]]:
        """Return the files of each node by name, the head's first.

        Each node's ``group.json`` has the same id, a digest of all files of all nodes, and the
        digests of the node's own, by which `doctor` sees what was edited, and the model's folder.
        """
        bare = [self._rank_files(number) for number in range(len(self.ranks))]
        group = digest(json.dumps([bare, self.links, self.url], sort_keys=True))[:16]
        settings: dict[str, object] = {
            "id": group,
            "name": self.cluster.name,
            "unit": self.cluster.unit,
            "nodes": [node.ssh for node in self.cluster.node],
        }
        workers = {
            str(number): {"node": self.cluster.node[number].ssh, "ssh": words}
            for number, words in enumerate(self.links, start=1)
        }
        ray = {"ray": self.ray} if self.ray else {}
        frozen = {"frozen": self.cluster.serve.frozen}
        of_head = {
            "model": self.model.name,
            "url": self.url,
            **ray,
            "workers": workers,
            **frozen,
        }
        of_head["caches"] = cache_folders(CACHES, self.ranks[0].env.node.vllm)["cache"]
        texts = [settings | of_head] + [settings] * len(workers)
        for files, text, rank in zip(bare, texts, self.ranks, strict=True):
            digests = {name: digest(content) for name, content in files.items()}
            device = targets().get(rank.env.node.target)
            own = {
                "watts": device.hung_watts if device else 0,
                "stacks": f"{rank.facts.home}/{STACKS}",
                "folder": absolute(self.model.folder, rank.facts),
                "address": rank.address,
                "files": digests,
            }
            if image := rank.facts.image:  # what runs a program in its container
                own["inside"] = [image.program, "exec", f"patchkit-{self.cluster.name}"]
                own["image"] = image.id
            else:  # by which `status` sees that another one was installed since
                own["venv"] = rank.facts.venv
                own["link"] = absolute(self.cluster.venv, rank.facts)
            files["group.json"] = json.dumps({**text, **own}, indent=1) + "\n"
        return bare

    def _rank_files(self, number: int) -> dict[str, str]:
        file, head = self.cluster, number == 0
        templates = {file.unit: "head" if head else "worker"}
        if head and len(self.ranks) > 1:
            templates[file.unit_name("-worker@")] = "watch"
        if head and file.serve.frozen:
            templates[file.guard_unit] = "alive"
        if head and self.ray:
            templates[file.unit_name("-ray")] = "ray"
        files = {"node.env": self.ranks[number].text}
        files |= node_scripts()
        values = self._unit_values(number)
        common = (RECIPES / "units" / "common.service").read_text(encoding="utf-8")
        for unit, template in templates.items():
            text = (RECIPES / "units" / f"{template}.service").read_text(
                encoding="utf-8"
            )
            values |= self._run_values(number, ray=template == "ray")
            lines = text.replace("$common\n", common).splitlines(keepends=True)
            filled = [
                Template(each).substitute(values) for each in lines if each[0] != "#"
            ]
            files[unit] = _HEADER + "".join(
                it for it in filled if it.partition("=")[2] != "\n"
            )
        return files

    def _unit_values(self, number: int) -> dict[str, str]:
        """Return what stands for the names in a rank's templates, however it is run."""
        file, rank, count = self.cluster, self.ranks[number], len(self.ranks)
        folder, frozen = f"%h/.config/patchkit/{file.name}", file.serve.frozen
        ray_unit = file.unit_name("-ray") if self.ray else ""
        # A percent sign begins a specifier.
        model = " ".join(self.model.name.split()).replace("%", "%%")
        part = f", rank {number} of {count}" if count > 1 else ""
        command, executor = self.ranks[0].command, rank.env.node.executor
        weights = command.request.weights if command else None
        # A name tells the least, by which a start would be given up too early.
        gib = weights.gib if weights and not weights.from_name else _MOST_GIB * count
        # A Ray that overwrites brings the head's to workers, whose homes may be others.
        of_head = executor.name == "ray" and executor.copies != "fills in"
        # Where a rank keeps what it compiles; a folder that systemd has elsewhere is made by hand.
        asked = (rank.env.node.vllm, self.model.name)
        caches = cache_variables(f"%h/{CACHES}", *asked).items()
        kept = [row for row in caches if not (of_head and row[0].startswith("VLLM_"))]
        own = rank.facts.systemd >= _STATE_SINCE
        graphs = cache_folders(_CACHES, *asked)["graphs"]
        start = f"-systemctl --user --no-block start {file.guard_unit}"
        return {
            "name": file.name,
            "unit": file.unit,
            "description": f"vLLM {model}{part} (cluster {file.name})",
            "script": f"/usr/bin/python3 {ALONE} {folder}/group.py",
            "alive": f"/usr/bin/python3 {ALONE} {folder}/alive.py",
            "watched": start if frozen else "",
            "frozen": str(frozen),
            "frozen_status": str(alive_script.FROZEN),
            "before": " ".join([ray_unit, *file.watch_units]).strip(),
            "seconds": str(_BEFORE_SECONDS + round(_SECONDS_PER_GIB * gib / count)),
            "mark": f"{MARK}={file.name}",
            "state": graphs if own else "",
            "make_state": "" if own else f"/usr/bin/mkdir -p %h/{_STATE}/{graphs}",
            "caches": " ".join(map("=".join, kept)),
            "ray_unit": ray_unit,
            "ray_address": f"RAY_ADDRESS={self.ray}" if self.ray else "",
            "ray_signal": "SIGKILL" if self.ray else "",
        }

    def _run_values(self, number: int, *, ray: bool) -> dict[str, str]:
        """Return what templates say of how a rank, or Ray's head, is run: in a container or not."""
        rank, name, words = (
            self.ranks[number],
            self.cluster.name,
            self.words(number, ray=ray),
        )
        facts, image, first = rank.facts, rank.facts.image, f"patchkit-{name}"
        if image is None:
            of_container = dict.fromkeys(("prepare", "remove", "runtime"), "")
            return of_container | {
                "command": unit_line(words),
                "env_file": f"%h/.config/patchkit/{name}/node.env",
                "kill_mode": "control-group",
                "path": unit_word(f"PATH={facts.venv}/bin:{_PROGRAMS}"),
            }
        models, folder = (
            absolute(it, facts) for it in (self.cluster.model_folder, self.model.folder)
        )
        container = Container(
            name=f"{first}-ray" if ray else first,
            group=name,
            rank=rank,
            image=image,
            folders=(models,)
            if folder.startswith(f"{models}/")
            else (folder,)
            if folder
            else (),
            caches=tuple(cache_variables("", rank.env.node.vllm)),
        )
        more = []
        if self.ray and number == 0:
            # The server finds Ray's head by its files and processes, which are in another one.
            runtime = f"/run/user/{image.user.partition(':')[0]}/{first}-ray"
            more = [mount(runtime, _RAY_FILES)]
            more += [] if ray else [f"--pid=container:{first}-ray"]
        return {
            "command": unit_line(container.words(words, *more)),
            "env_file": "",  # the engine reads it
            "kill_mode": "mixed",  # its program in the foreground hands signals on
            "path": "",
            "prepare": unit_line(container.prepare),
            "remove": f"-{unit_line(container.remove)}",
            "runtime": f"{first}-ray" if self.ray else "",
        }


def node_scripts() -> dict[str, str]:
    """Return the scripts of a node: there they stand side by side, without patchkit."""
    texts = {
        name: Path(str(module.__file__)).read_text(encoding="utf-8")
        for name, module in SCRIPTS.items()
    }
    for name, module in SCRIPTS.items():
        stem = name.removesuffix(".py")
        package, _, module_name = module.__name__.rpartition(".")
        imports = {
            f"from {package} import {module_name} as {stem}\n": f"import {stem}\n",
            f"from {module.__name__} import": f"from {stem} import",
        }
        for here, there in imports.items():
            texts = {
                script: text.replace(here, there) for script, text in texts.items()
            }
    return texts


def unit_word(word: str) -> str:
    """Return a word of a unit's command line or assignment, quoted as systemd.syntax(7) says."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    kept = "".join(
        c if c.isprintable() else "".join(f"\\x{b:02x}" for b in c.encode())
        for c in escaped
    )
    return (
        f'"{kept}"'
        if not word or set(word) & set(" \t\"'\\;") or kept != escaped
        else kept
    )


def unit_line(words: Sequence[str]) -> str:
    """Return a command line for ExecStart: in it a dollar sign begins a variable."""
    first, *rest = words
    return " ".join(
        [unit_word(first), *(unit_word(each).replace("$", "$$") for each in rest)]
    )
