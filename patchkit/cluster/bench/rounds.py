"""Plan how variants of a model are served, measure them in turns, and save each result."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, field, replace
from pathlib import Path

from patchkit import __version__
from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.cluster.bench.benchmark import BenchLoad, Benchmark, run_benchmark
from patchkit.cluster.bench.figures import CONDITIONS, result_file, result_files
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.start_plan import make_plan
from patchkit.cluster.launch.up import StartWatcher, serve_model
from patchkit.durable.atomic import replacing
from patchkit.errors import HostError, UsageError, translated
from patchkit.frozen import Fields, Texts, Values, frozen
from patchkit.process import attempt
from patchkit.records import RecordError
from patchkit.runtime.host.host import Host
from patchkit.runtime.rules.secret_texts import mask_secrets
from patchkit.units import KIB_PER_GIB

_FIND_VLLM = "import importlib.util as u; u.find_spec('vllm').name"
# With the prefix cache, the warm-up would cache a prompt that is measured later.
_NO_PREFIXES = "--no-enable-prefix-caching"
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")


@frozen
class PlannedVariant:
    """A way to serve a model, and the ``python`` that runs the benchmark.

    ``words`` are those of `vllm serve` on the head, ``shared`` the variables of all nodes, and
    ``facts`` those of each node. ``tokenizer`` is a folder, "" for the tokenizer of the model. A
    server that runs already has a ``url``; its words, variables and facts are not known.
    """

    name: str
    python: str
    words: Texts = ()
    shared: Values = field(default_factory=dict)
    facts: tuple[NodeFacts, ...] = ()
    tokenizer: str = ""
    cluster: Cluster | None = None
    url: str = ""


def plan_cluster(
    cluster: Cluster,
    name: str,
    model: str,
    venv: str,
    args: Sequence[str],
) -> PlannedVariant:
    """Return a variant as `patchkit up` would start it, but without prefix caching.

    Raises HostError if the environment has no benchmark, or if the server would not listen to this
    machine; UsageError for arguments that cluster.toml must not hold; what ``make_plan`` does.
    """
    python = bench_python(venv or cluster.venv)
    try:
        serve = replace(cluster.serve, args=(*cluster.serve.args, _NO_PREFIXES, *args))
    except RecordError as error:  # a key among the words
        raise UsageError(str(error)) from None

    cluster = replace(cluster, serve=serve)
    units = make_plan(cluster, model).units
    if not cluster.head.here and units.url.startswith("http://127."):
        raise HostError(
            f"{cluster.head.destination} answers itself alone",
            hint='listen = "lan" in [serve] of its file, or measure on the head',
        )

    folder = Path(units.model.folder).expanduser()
    has_tokenizer = (folder / "tokenizer.json").exists()

    settings = units.ranks[0].env.settings
    return PlannedVariant(
        name=name,
        python=python,
        words=units.words(0),
        shared={item.name: item.value for item in settings if item.scope != "host"},
        facts=tuple(rank.facts for rank in units.ranks),
        tokenizer=str(folder) if has_tokenizer else "",
        cluster=cluster,
    )


def describe_conditions(
    model: str,
    variants: Sequence[PlannedVariant],
    loads: Sequence[BenchLoad],
) -> Fields:
    """Return the setup as values for JSON, without addresses, names of machines and secrets.

    Raises UsageError if two variants have the same name.
    """
    names = [variant.name for variant in variants]
    if len(set(names)) < len(names):
        raise UsageError(
            f"two variants are called {names[0]!r}", hint="rename one of the files"
        )

    return {
        "patchkit": __version__,
        "tool": "vllm bench serve",
        "model": model,
        "machines": [_describe_machine(facts.host) for facts in variants[0].facts],
        "loads": {load.name: asdict(load) for load in loads},
        "variants": {variant.name: _describe_variant(variant) for variant in variants},
    }


def _describe_machine(host: Host) -> Fields:
    """Return the hardware and the system of a machine, without its name."""
    machine = asdict(host.system)
    del machine["hostname"]
    memory = f"{host.memory.total / KIB_PER_GIB:.0f} GiB" if host.memory else ""
    return {"gpus": list(map(asdict, host.gpus)), **machine, "memory": memory}


def _describe_variant(variant: PlannedVariant) -> Fields:
    # The name of a variable tells whether its value is a secret.
    settings = [_mask(f"{name}={value}") for name, value in variant.shared.items()]
    return {
        "command": _mask(" ".join(variant.words)),
        "variables": dict(setting.partition("=")[::2] for setting in settings),
        "versions": dict(variant.facts[0].host.versions) if variant.facts else {},
    }


def _mask(text: str) -> str:
    return _ADDRESS.sub("ADDRESS", mask_secrets(text))


def bench_python(venv: str) -> str:
    """Return the path of the Python that runs the benchmark; "" stands for this environment.

    Raises HostError if it has no vLLM: starting a server, which comes first, takes minutes.
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


@frozen
class BenchPlan:
    """The variants and loads to measure, the number of rounds, and the folder for results."""

    model: str
    variants: Sequence[PlannedVariant]
    loads: Sequence[BenchLoad]
    rounds: int
    folder: Path
    tokenizer: str = ""

    def turns(self) -> Iterator[tuple[int, PlannedVariant]]:
        """Yield the number of a round, from 0, with each variant in turn.

        The order is A B, B A, A B, so that a drift over time, such as heat, affects all alike.
        """
        for number in range(self.rounds):
            step = -1 if number % 2 else 1
            for variant in self.variants[::step]:
                yield number, variant


def measure_variants(
    plan: BenchPlan,
    watcher: StartWatcher,
    tell: Callable[[str], None],
) -> None:
    """Measure each load with each variant in every round; ``tell`` is called before each step.

    Raises HostError if a benchmark fails, UsageError if the folder holds results already, or if two
    variants have the same name.
    """
    _keep_conditions(plan)

    for number, variant in plan.turns():
        title = f"round {number + 1} of {plan.rounds}, {variant.name}"
        tell(f"{title}: the server starts" if variant.cluster else title)

        with _serve(variant, plan.model, watcher) as (url, model):
            for load in plan.loads:
                tell(f"{title}: {load.name}")
                # A cluster file may name the model as it likes: no tokenizer has that name.
                benchmark = Benchmark(
                    python=variant.python,
                    url=url,
                    model=model,
                    tokenizer=plan.tokenizer or variant.tokenizer or plan.model,
                    load=load,
                    seed=number,
                )
                place = result_file(plan.folder, variant.name, load.name, number)
                run_benchmark(benchmark, place)


@contextlib.contextmanager
def _serve(
    variant: PlannedVariant,
    model: str,
    watcher: StartWatcher,
) -> Iterator[tuple[str, str]]:
    """Serve a variant in the context; yield the server's URL, and the model's name there.

    A variant without a cluster has a server that runs already.
    """
    if variant.cluster is None:
        yield variant.url, model
        return

    with serve_model(variant.cluster, model, watcher) as units:
        yield units.url, units.model.name


def _keep_conditions(plan: BenchPlan) -> None:
    """Write the setup into the folder. Raises UsageError if it holds results already."""
    conditions = describe_conditions(plan.model, plan.variants, plan.loads)
    if result_files(plan.folder):
        raise UsageError(
            f"{plan.folder}: holds results already", hint="name a new folder: -o DIR"
        )

    place = plan.folder / CONDITIONS
    with translated(at=place):
        plan.folder.mkdir(parents=True, exist_ok=True)
        with replacing(place) as file:
            text = json.dumps(conditions, indent=1, sort_keys=True)
            file.write(f"{text}\n".encode())
