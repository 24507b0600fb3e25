"""Measure a server in rounds with vLLM's own benchmark; save each result with its setup."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, field
from pathlib import Path

from patchkit import __version__
from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.cluster.bench.figures import CONDITIONS, result_file, result_files
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.start_plan import make_plan
from patchkit.errors import HostError, StorageError, UsageError
from patchkit.frozen import Fields, Texts, Values, frozen
from patchkit.http_exchange import HttpServer
from patchkit.process import attempt, run
from patchkit.quoting import quoted
from patchkit.reading import read_text
from patchkit.records import RECIPES, RecordError, read_json, read_toml
from patchkit.runtime.host.host import Host
from patchkit.runtime.python.startup import VLLM
from patchkit.runtime.rules.secret_texts import mask_secrets
from patchkit.units import KIB_PER_GIB

_FIND_VLLM = "import importlib.util as u; u.find_spec('vllm').name"
_WARM_UP = (
    2**16
)  # seed of the prompts before the first round, which no round asks again
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")


def server_of(cluster: Cluster, model: str, venv: str) -> MeasuredServer:
    """Return the server of a cluster, as `patchkit up` started it.

    Raises HostError if no server answers there, or if the environment has no benchmark; what
    ``make_plan`` raises.
    """
    python = bench_python(venv or cluster.venv)
    units = make_plan(cluster, model).units
    if HttpServer(units.url).ask("/v1/models").closed:
        raise HostError(
            f"{units.url} does not answer",
            why="`bench` measures a model that is served, and from here its address is reached "
            'only if it listens to this machine: listen = "lan" in [serve]',
            hint=quoted("patchkit", "up", model),
        )

    folder = Path(units.model.folder).expanduser()
    has_tokenizer = (folder / "tokenizer.json").exists()
    settings = units.ranks[0].env.settings
    return MeasuredServer(
        url=units.url,
        python=python,
        model=units.model.name,
        tokenizer=str(folder) if has_tokenizer else model,
        words=units.words(0),
        shared={item.name: item.value for item in settings if item.scope != "host"},
        facts=tuple(rank.facts for rank in units.ranks),
    )


def describe_conditions(server: MeasuredServer, loads: Sequence[BenchLoad]) -> Fields:
    """Return the setup as values for JSON, without addresses, names of machines and secrets."""
    # The name of a variable tells whether its value is a secret.
    settings = [_mask(f"{name}={value}") for name, value in server.shared.items()]
    return {
        "patchkit": __version__,
        "tool": "vllm bench serve",
        "model": server.model,
        "machines": [_describe_machine(facts.host) for facts in server.facts],
        "loads": {load.name: asdict(load) for load in loads},
        "command": _mask(" ".join(server.words)),
        "variables": dict(setting.partition("=")[::2] for setting in settings),
        "versions": dict(server.facts[0].host.versions) if server.facts else {},
    }


def _describe_machine(host: Host) -> Fields:
    """Return the hardware and the system of a machine, without its name."""
    machine = asdict(host.system)
    del machine["hostname"]
    memory = f"{host.memory.total / KIB_PER_GIB:.0f} GiB" if host.memory else ""
    return {"gpus": list(map(asdict, host.gpus)), **machine, "memory": memory}


def _mask(text: str) -> str:
    return _ADDRESS.sub("ADDRESS", mask_secrets(text))


def bench_python(venv: str) -> str:
    """Return the path of the Python that runs the benchmark; "" stands for this environment.

    Raises HostError if it has no vLLM.
    """
    python = str(Path(venv or sys.prefix).expanduser().absolute() / "bin/python")
    if attempt(python, "-c", _FIND_VLLM).trouble:
        raise HostError(
            f"{python}: vllm bench serve is not here",
            why="the benchmark is a part of vLLM",
            hint="name an environment on this machine that has vLLM: --venv DIR; "
            "it needs no GPU to ask a server elsewhere",
        )
    return python


def measure_rounds(
    server: MeasuredServer,
    loads: Sequence[BenchLoad],
    rounds: int,
    folder: Path,
    tell: Callable[[str], None],
) -> None:
    """Measure each load in every round; ``tell`` is called before each step.

    Raises HostError if a benchmark fails, UsageError if the folder holds results already.
    """
    _keep_conditions(folder, describe_conditions(server, loads))

    for load in loads:
        tell(f"{load.name}: the server warms up")
        warm_up = folder / "warm-up.json"
        run_benchmark(server, load, warm_up, seed=_WARM_UP)
        warm_up.unlink()

    for number in range(rounds):
        for load in loads:
            tell(f"round {number + 1} of {rounds}: {load.name}")
            place = result_file(folder, load.name, number)
            run_benchmark(server, load, place, seed=number)


def _keep_conditions(folder: Path, conditions: Fields) -> None:
    """Write the setup into the folder. Raises UsageError if it holds results already."""
    if result_files(folder):
        raise UsageError(
            f"{folder}: holds results already", hint="name a new folder: -o DIR"
        )

    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(conditions, indent=1, sort_keys=True)
    (folder / CONDITIONS).write_text(f"{text}\n", encoding="utf-8")


_LONGEST_MEASUREMENT = 3600.0  # seconds
_WORDS = read_toml(Texts, RECIPES / "bench.toml", key="words")


@frozen
class BenchLoad:
    """Random ``prompts`` of ``depth`` tokens, answers of ``output``; ``concurrency`` at a time."""

    depth: int
    output: int
    concurrency: int
    prompts: int

    @property
    def name(self) -> str:
        return f"in{self.depth}-out{self.output}-c{self.concurrency}"


@frozen
class MeasuredServer:
    """A server at ``url``, and the ``python`` whose vLLM asks it.

    ``model`` is the model's name there, ``tokenizer`` a folder or a name. ``words`` are those of
    `vllm serve` on the head, ``shared`` the variables of all nodes, ``facts`` those of each node;
    they are unknown for a server that patchkit did not start.
    """

    url: str
    python: str
    model: str
    tokenizer: str
    words: Texts = ()
    shared: Values = field(default_factory=dict)
    facts: tuple[NodeFacts, ...] = ()


def run_benchmark(
    server: MeasuredServer,
    load: BenchLoad,
    place: Path,
    *,
    seed: int = 0,
    seconds: float = _LONGEST_MEASUREMENT,
) -> Fields:
    """Run `vllm bench serve`; write its result to ``place``, complete or not at all, and return it.

    ``seed`` determines the random prompts, ``seconds`` is the time limit. Raises HostError if the
    benchmark fails, or if a request was not answered; StorageError if the benchmark left no
    readable result.
    """
    part = place.with_suffix(".part")
    place.parent.mkdir(parents=True, exist_ok=True)
    words = [
        word.format(server=server, load=load, seed=seed, part=part) for word in _WORDS
    ]
    run(
        server.python,
        *VLLM,
        *words,
        timeout=seconds,
        why="it needs the model's tokenizer",
        hint="--tokenizer DIR names the tokenizer of a model that is not on this machine",
    )

    try:
        result = read_json(Fields, read_text(part))
    except RecordError as error:
        raise StorageError(f"{part}: no result of the benchmark: {error}") from None
    completed = result.get("completed")
    if completed != load.prompts:
        raise HostError(
            f"{completed} of {load.prompts} requests were answered",
            why="the server refused or broke the others: a prompt too long, or an engine that died",
            hint="patchkit doctor",
        )
    part.replace(place)
    return result
