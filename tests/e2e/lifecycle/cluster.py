"""A cluster on the rack, asked and hurt from outside: `patchkit cluster` on the laptop, fake ranks.

Whether a cluster serves, the server says; what is left of it, the nodes' processes and systemd.
"""

from __future__ import annotations

import contextlib
import json
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from e2e.emulation.scenarios import UnexpectedError
from e2e.lifecycle import fake_venv, rack, wiring
from e2e.lifecycle.fake_vllm import WORKER
from e2e.lifecycle.nodes import HOME
from e2e.lifecycle.rack import Rack
from patchkit.process import Completed

MODEL, OTHER_MODEL = "~/models/tiny", "~/models/other"
URL = "http://127.0.0.1:8000"  # on the head
QUESTION = json.dumps({"prompt": "a b", "max_tokens": 4})
# A node without a GPU, and a cable that is no QSFP cage: what a Spark's probe says by itself.
CHOICES = {"topology": "socket", "target": "gb10"}
UP_SECONDS = 180
LOAD_SECONDS = 1.0  # of a fake rank
Process = Literal["main", "worker"]
# Processes of ranks, by what their command line holds.
COMMANDS = {"main": "[b]in/vllm serve", "worker": f"[{WORKER[0]}]{WORKER[1:]}"}
# What a node still has: processes with the group's mark, by their command; units that are not off.
LEFT = """\
for each in $(grep -slz '^PATCHKIT_CLUSTER=' /proc/[0-9]*/environ); do
  tr '\\0' ' ' < "${each%environ}cmdline"; echo
done
systemctl --user list-units --plain --no-legend --state="$0" 'patchkit-*'
"""
ON = "active,activating,deactivating,reloading"


@dataclass(frozen=True)
class EmulatedCluster:
    """A cluster of all nodes of the rack, the first one its head.

    ``patience``: seconds for a start.
    """

    rack: Rack
    patience: int = UP_SECONDS

    @property
    def names(self) -> list[str]:
        return list(self.rack.nodes)

    @property
    def home(self) -> Path:
        """Return the home on the laptop, as it is reached from outside."""
        return self.rack.laptop.node.file(rack.HOME)

    def prepare(self) -> None:
        """Put the fake on all nodes, two models, and the cluster's file on the laptop."""
        for node in self.rack.nodes.values():
            fake_venv.install(node, LOAD=LOAD_SECONDS)
        self.copy_models()
        self.describe()

    def copy_models(self) -> None:
        """Put two models on all nodes."""
        for node in self.rack.nodes.values():
            for model in (MODEL, OTHER_MODEL):
                for name, text in small_model().items():
                    fake_venv.write(node, f"{HOME}{model[1:]}/{name}", text)

    def describe(self, **choices: object) -> None:
        """Write the cluster's file on the laptop; ``choices`` are about the server."""
        said = {**CHOICES, **choices}
        tables = ["[serve]\n" + "".join(f"{key} = {_toml(said[key])}\n" for key in said)]
        tables += [
            f'[[node]]\nssh = "{name}"\naddress = "{wiring.qsfp_ip(node.number)}"\n'
            for name, node in self.rack.nodes.items()
        ]
        (self.home / "cluster.toml").write_text("\n".join(tables))

    def change(self, **settings: object) -> None:
        """Let the next start of all ranks do this; all else as by default."""
        for node in self.rack.nodes.values():
            fake_venv.change(node, **{"LOAD": LOAD_SECONDS, **settings})

    def patchkit(self, *words: str) -> Completed:
        """Run `patchkit …` on the laptop. Raises UnexpectedError for a traceback."""
        group = ("cluster",) if words[0] in ("init", "install") else ()
        done = self.rack.laptop.patchkit(*group, *words, seconds=self.patience)
        insist("Traceback" not in done.errors, f"a traceback: {done.errors}")
        return done

    def up(self, model: str = MODEL) -> Completed:
        """Start it; it has to work, and to answer."""
        done = self.patchkit("up", model)
        insist(done.status == 0, f"up: {done.trouble}")
        insist(self.answers(), "up said that it serves, and it does not answer")
        return done

    def down(self) -> None:
        """Stop it; nothing may be left."""
        done = self.patchkit("down")
        insist(done.status == 0, f"down: {done.trouble}")
        self.insist_on_nothing()

    def answers(self, seconds: int = 5) -> bool:
        """Return whether it gives a token."""
        head = self.rack[self.names[0]]
        ask = ("curl", "--silent", "--fail", "--max-time", str(seconds), f"{URL}/v1/completions")
        return bool(head.init) and not head.user(*ask, "--json", QUESTION).trouble

    def processes(self, name: str) -> dict[Process, list[str]]:
        """Return the processes of a node's rank; none for a node that is off."""
        node = self.rack[name]
        if not node.init:
            return {"main": [], "worker": []}
        found = {kind: node.user("pgrep", "-f", words) for kind, words in COMMANDS.items()}
        return {"main": found["main"].output.split(), "worker": found["worker"].output.split()}

    def ranks(self) -> dict[str, dict[Process, list[str]]]:
        return {name: self.processes(name) for name in self.names}

    def kill(self, name: str, process: Process) -> None:
        """Kill a process of a node's rank with SIGKILL."""
        pids = self.processes(name)[process]
        insist(len(pids) == 1, f"{name} has {len(pids)} {process} processes")
        self.rack[name].user("kill", "-KILL", *pids)

    def heals(self, before: dict[str, dict[Process, list[str]]] | None = None) -> str:
        """Wait until it answers, from new processes on all nodes if ``before`` is given.

        Nobody asks it before: a rank's end has to be noticed without a request.
        """
        began = time.monotonic()
        if before:
            wait(lambda: self._renewed(before), self.patience, "the ranks are not started again")
        wait(self.answers, self.patience, "it does not answer again")
        for name, found in self.ranks().items():
            counts = {kind: len(pids) for kind, pids in found.items()}
            insist(set(counts.values()) == {1}, f"{name} has {counts}")
        return f"serves again after {time.monotonic() - began:.0f} s"

    def insist_on_nothing(self, *, failed: bool = False) -> None:
        """Raise UnexpectedError if a process or a unit is left on a node that is on.

        ``failed``: units may be failed.
        """
        left = self.left(ON if failed else f"{ON},failed")
        insist(not left, f"left: {left}")

    def left(self, states: str = f"{ON},failed") -> dict[str, str]:
        """Return the processes of ranks and the units in these states, by node that has any."""
        found = {
            name: node.user("sh", "-c", LEFT, states).output.strip()
            for name, node in self.rack.nodes.items()
            if node.init
        }
        for name, ranks in self.ranks().items():
            if any(ranks.values()):
                found[name] = f"{found.get(name, '')} {ranks}"
        return {name: text for name, text in found.items() if text}

    def _renewed(self, before: dict[str, dict[Process, list[str]]]) -> bool:
        now = self.ranks()
        return all(
            now[name][kind] and not set(now[name][kind]) & set(pids)
            for name, found in before.items()
            for kind, pids in found.items()
        )


def insist(condition: bool, otherwise: str) -> None:
    if not condition:
        raise UnexpectedError(otherwise)


def wait(condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
    """Wait until it holds. Raises UnexpectedError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        insist(time.monotonic() < deadline, f"{otherwise}, after {seconds:.0f} s")
        time.sleep(0.3)


@dataclass(frozen=True)
class LifecycleLab:
    """``work`` is for logs, by scenario; ``root`` the file system of all nodes."""

    work: Path
    root: Path

    def rack(self, name: str, count: int = 2) -> contextlib.AbstractContextManager[Rack]:
        return rack.up(self.root, self.work / "logs" / name, count)

    @contextlib.contextmanager
    def bare(self, name: str, count: int = 2) -> Iterator[EmulatedCluster]:
        """Nodes with models, and nothing else."""
        with self.rack(name, count) as here:
            cluster = EmulatedCluster(here)
            cluster.copy_models()
            yield cluster

    @contextlib.contextmanager
    def prepared(self, name: str, count: int = 2) -> Iterator[EmulatedCluster]:
        """Nodes on which a cluster can be started."""
        with self.rack(name, count) as here:
            cluster = EmulatedCluster(here)
            cluster.prepare()
            yield cluster

    @contextlib.contextmanager
    def serving(self, name: str, count: int = 2) -> Iterator[EmulatedCluster]:
        """A cluster that serves; afterwards it is stopped, and nothing may be left of it."""
        with self.prepared(name, count) as cluster:
            cluster.up()
            yield cluster
            cluster.down()


def _toml(value: object) -> str:
    """Return a value as TOML has it, which for these is JSON's form but for tables."""
    if isinstance(value, dict):
        pairs = ", ".join(f"{key} = {_toml(each)}" for key, each in value.items())
        return f"{{ {pairs} }}"
    return json.dumps(value, ensure_ascii=False)


def small_model() -> dict[str, str]:
    """Return the files of a model of one number."""
    header = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    weights = struct.pack("<Q", len(header)).decode() + header + "\0" * 4
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    return {"config.json": json.dumps(config), "model.safetensors": weights}
