"""A cluster of such nodes, asked and hurt from outside: `patchkit` on the laptop, fake ranks.

Whether a cluster serves, the server says; what is left of it, the nodes' processes and systemd.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from e2e.emulation import wires
from e2e.emulation.lab import insist
from e2e.lifecycle import fake_venv, image, rack
from e2e.lifecycle.fake_vllm import WORKER
from e2e.lifecycle.nodes import HOME, SystemdNode
from e2e.lifecycle.rack import Laptop
from patchkit.cluster.agent.memory_record import has_unified_groups
from patchkit.follow import Completed

MODEL, OTHER_MODEL = "~/models/tiny", "~/models/other"
URL = "http://127.0.0.1:8000"  # on the head
MASTER_PORT = 29501
UNIT = "patchkit-vllm.service"
QUESTION = json.dumps({"prompt": "a b", "max_tokens": 4})
# A node without a GPU, and a cable that is no QSFP cage: what a Spark's probe says by itself.
CHOICES: dict[str, object] = {"topology": "socket", "target": "gb10"}
if not has_unified_groups():
    CHOICES["memory_floor"] = (
        0.0  # nodes have this machine's groups, in which no guard works
    )
UP_SECONDS = 180
LOAD_SECONDS = 1.0  # of a fake rank
Process = Literal["main", "worker"]
Begin = Literal["bare", "stopped", "serving"]
Engine = Literal["venv", "docker", "podman"]  # in what the ranks run
ANY: tuple[Engine, ...] = get_args(Engine)
# The tick at which each process began, by proc(5): its name, in parentheses, may hold blanks.
_STARTS = (
    "for pid; do sed -n \"s/.*) /$pid /p\" /proc/$pid/stat; done | cut -d' ' -f1,21"
)
Ranks = dict[str, dict[Process, list[str]]]  # processes, each with its start, by node
# Processes of ranks, by what their command line holds.
COMMANDS: dict[Process, str] = {
    "main": "[b]in/vllm serve",
    "worker": f"[{WORKER[0]}]{WORKER[1:]}",
}
# What a node still has: processes with the group's mark, by their command; units that are not off.
LEFT = """\
for each in $(grep -slz '^PATCHKIT_CLUSTER=' /proc/[0-9]*/environ); do
  tr '\\0' ' ' < "${each%environ}cmdline"; echo
done
systemctl --user list-units --plain --no-legend --state="$0" 'patchkit-*'
[ "$1" = venv ] || "$1" ps --all --format '{{.Names}} {{.Status}}'
"""
ON = "active,activating,deactivating,reloading"


@dataclass(frozen=True)
class EmulatedCluster:
    """A cluster of all nodes, spark1 its head.

    ``folder`` is for logs, ``patience`` are the seconds for a start; ``archive`` is an image's.
    """

    nodes: Mapping[str, SystemdNode]
    laptop: Laptop
    wires: wires.Wiring
    folder: Path
    patience: int = UP_SECONDS
    engine: Engine = "venv"
    archive: Path = Path()
    choices: dict[str, object] = field(default_factory=lambda: dict(CHOICES))

    @property
    def names(self) -> list[str]:
        return list(self.nodes)

    @property
    def head(self) -> SystemdNode:
        return self.nodes["spark1"]

    @property
    def worker(self) -> SystemdNode:
        return self.nodes["spark2"]

    @property
    def home(self) -> Path:
        """Return the home on the laptop, as it is reached from outside."""
        return self.laptop.node.file(rack.HOME)

    def prepare(self, begin: Begin) -> None:
        """Put two models on all nodes; unless they stay bare the fake, too, and serve if asked."""
        for node in self.nodes.values():
            for model in (MODEL, OTHER_MODEL):
                fake_venv.write_model(node, f"{HOME}{model[1:]}")
            if begin != "bare":
                self.install(node)
        self.change()
        self.describe()
        if begin == "serving":
            self.up()

    def install(self, node: SystemdNode) -> None:
        """Give a node what the ranks run in, as `cluster install` leaves it."""
        if self.engine == "venv":
            fake_venv.install(node)
        else:
            pin = image.install(node, self.engine, self.archive)
            self.choices.update(engine=self.engine, image=f"{image.NAME}@{pin}")

    def describe(
        self, names: Sequence[str] = (), *, name: str = "vllm", **choices: object
    ) -> None:
        """Write the cluster's file on the laptop; ``choices`` are about the server.

        ``names`` are its nodes by rank, by default all of them.
        """
        said = {**self.choices, **choices}
        tables = [f'name = "{name}"\n']
        tables += [
            "[serve]\n" + "".join(f"{key} = {_toml(said[key])}\n" for key in said)
        ]
        tables += [
            f'[[node]]\nssh = "{each}"\naddress = "{wires.qsfp_ip(self.nodes[each].number)}"\n'
            for each in names or self.names
        ]
        (self.home / "cluster.toml").write_text("\n".join(tables))

    def change(self, **settings: object) -> None:
        """Let the next start of all ranks do this; all else as by default."""
        said = {"LOAD": LOAD_SECONDS, **settings}
        text = "".join(f"FAKE_{name}={value}\n" for name, value in said.items())
        for node in self.nodes.values():
            for model in (MODEL, OTHER_MODEL):
                fake_venv.write(node, f"{HOME}{model[1:]}/fake.env", text)

    def patchkit(self, *words: str) -> Completed:
        """Run `patchkit …` on the laptop. Raises UnexpectedError for a traceback."""
        group = ("cluster",) if words[0] in ("init", "install") else ()
        done = self.laptop.patchkit(*group, *words, seconds=self.patience)
        insist("Traceback" not in done.errors, f"a traceback: {done.errors}")
        return done

    def expect(
        self, *words: str, status: int = 0, says: str | Sequence[str] = ()
    ) -> str:
        """Run `patchkit …`; it has to end so and to say so. Return what it says."""
        done = self.patchkit(*words)
        said = f"{done.output}{done.errors}"
        insist(done.status == status, f"{words[0]}: status {done.status}: {said}")
        for each in [says] if isinstance(says, str) else says:
            insist(each in said, f"{words[0]} does not say {each!r}: {said}")
        return said

    def up(self, model: str = MODEL) -> None:
        """Start it; it has to work, and to answer."""
        self.expect("up", model)
        insist(self.answers(), "up said that it serves, and it does not answer")

    def down(self) -> None:
        """Stop it; nothing may be left."""
        self.expect("down")
        self.insist_on_nothing()

    def head_status(self) -> dict[str, Any]:
        """Return what `status` says of the head."""
        found: dict[str, Any] = json.loads(self.patchkit("status", "--json").output)[
            "nodes"
        ][0]
        return found

    def answers(self, seconds: int = 5) -> bool:
        """Return whether it gives a token."""
        ask = (
            "curl",
            "--silent",
            "--fail",
            "--max-time",
            str(seconds),
            f"{URL}/v1/completions",
        )
        return (
            bool(self.head.init)
            and not self.head.user(*ask, "--json", QUESTION).trouble
        )

    def served(self) -> str:
        """Return the model that is served, "" if none is."""
        models = self.head.user("curl", "--silent", f"{URL}/v1/models").output
        return str(json.loads(models)["data"][0]["id"]) if models else ""

    def processes(self, name: str) -> dict[Process, list[str]]:
        """Return the processes of a node's rank; none for a node that is off."""
        node = self.nodes[name]
        return {
            kind: node.user("pgrep", "-f", words).output.split() if node.init else []
            for kind, words in COMMANDS.items()
        }

    def ranks(self) -> Ranks:
        """Return the processes of all ranks, each with its start: a reboot gives numbers anew."""
        return {
            name: {
                kind: self._starts(name, pids)
                for kind, pids in self.processes(name).items()
            }
            for name in self.names
        }

    def _starts(self, name: str, pids: Sequence[str]) -> list[str]:
        done = self.nodes[name].user("sh", "-c", _STARTS, "sh", *pids) if pids else None
        return done.output.splitlines() if done else []

    def kill(self, name: str, process: Process, signal: str = "KILL") -> None:
        """Send a signal to a process of a node's rank; it has to be there and take it."""
        pids = self.processes(name)[process]
        insist(len(pids) == 1, f"{name} has {len(pids)} {process} processes")
        done = self.nodes[name].user("kill", f"-{signal}", *pids)
        insist(not done.trouble, f"{name}: kill -{signal}: {done.trouble}")

    def heals(self, before: Ranks | None = None) -> str:
        """Wait until it answers, from new processes on all nodes if ``before`` is given.

        Nobody asks it before: a rank's end has to be noticed without a request.
        """
        began = time.monotonic()

        def renewed() -> bool:
            now = self.ranks()
            return all(
                now[name][kind] and not set(now[name][kind]) & set(pids)
                for name, found in before.items()
                for kind, pids in found.items()
            )

        if before:
            wait(renewed, self.patience, "the ranks are not started again")
        wait(self.answers, self.patience, "it does not answer again")
        for name, found in self.ranks().items():
            counts = {kind: len(pids) for kind, pids in found.items()}
            insist(set(counts.values()) == {1}, f"{name} has {counts}")
        return f"serves again after {time.monotonic() - began:.0f} s"

    def insist_on_nothing(self) -> None:
        """Raise UnexpectedError if a process or a unit is left on a node that is on."""
        left = self.left()
        insist(not left, f"left: {left}")

    def left(self, states: str = f"{ON},failed") -> dict[str, str]:
        """Return the processes of ranks and the units in these states, by node that has any."""
        found = {}
        for name, node in self.nodes.items():
            said = (
                node.user("sh", "-c", LEFT, states, self.engine).output.strip()
                if node.init
                else ""
            )
            ranks = self.processes(name)
            if said or any(ranks.values()):
                found[name] = f"{said} {ranks}"
        return found


def wait(condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
    """Wait until it holds. Raises UnexpectedError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        insist(time.monotonic() < deadline, f"{otherwise}, after {seconds:.0f} s")
        time.sleep(0.3)


@dataclass(frozen=True)
class LifecycleLab:
    """``work`` is for logs, by scenario; ``root`` the file system of all nodes.

    ``archive`` is the image of ranks in containers.
    """

    work: Path
    root: Path
    archive: Path

    @contextlib.contextmanager
    def cluster(
        self,
        name: str,
        begin: Begin = "stopped",
        count: int = 2,
        engine: Engine = "venv",
    ) -> Iterator[EmulatedCluster]:
        """Boot nodes, and bring them to where something begins."""
        folder = self.work / "logs" / name
        with rack.up(self.root, folder, count, shared=(self.archive.parent,)) as parts:
            cluster = EmulatedCluster(
                *parts, folder, engine=engine, archive=self.archive
            )
            cluster.prepare(begin)
            yield cluster


Act = Callable[[EmulatedCluster], str]
SCENARIOS: dict[str, Callable[[LifecycleLab], tuple[str, ...]]] = {}
USUAL: list[str] = []  # the names of those that are run if none is asked for


def scenario(
    begin: Begin, count: int = 2, engines: Sequence[Engine] = ("venv",)
) -> Callable[[Act], Act]:
    """Register a scenario by its name, and the engine's unless it is a venv.

    Each engine can be asked for, ``engines`` are usual. Its docstring is what the page says.

    It breaks something on a cluster of its own, insists, and says what came of it. Then the
    cluster is stopped: nothing may be left.
    """

    def register(act: Act) -> Act:
        def row(lab: LifecycleLab, name: str, engine: Engine) -> tuple[str, ...]:
            began = time.monotonic()
            with lab.cluster(name, begin, count, engine) as cluster:
                outcome = act(cluster)
                cluster.down()
            what = " ".join((act.__doc__ or "").split())
            return (f"`{name}`", what, f"{time.monotonic() - began:.0f}", outcome)

        for engine in ANY:
            name = act.__name__ if engine == "venv" else f"{act.__name__}_{engine}"
            SCENARIOS[name] = partial(row, name=name, engine=engine)
            USUAL.extend([name] * (engine in engines))
        return act

    return register


def _toml(value: object) -> str:
    """Return a value as TOML has it, which for these is JSON's form but for tables."""
    if isinstance(value, dict):
        pairs = ", ".join(f"{key} = {_toml(each)}" for key, each in value.items())
        return f"{{ {pairs} }}"
    return json.dumps(value, ensure_ascii=False)
