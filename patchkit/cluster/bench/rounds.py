"""Measure a server in rounds with vLLM's own benchmark; read results, and compare two series."""

import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Any, Literal

from patchkit import __version__
from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.start_plan import make_plan
from patchkit.errors import HostError, StorageError, UsageError
from patchkit.foreign import positive_number
from patchkit.frozen import Fields, Texts, Values, frozen, positional
from patchkit.http_exchange import HttpServer
from patchkit.process import attempt, run
from patchkit.quoting import quoted
from patchkit.reading import read_text, user_path
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

    folder = user_path(units.model.folder)
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
    python = str(user_path(venv or sys.prefix).absolute() / "bin/python")
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


CONDITIONS = "digest.json"
ENOUGH = 3
"""The least number of repetitions from whose spread a verdict can be drawn."""
_RAW = "raw"
_RESULTS = "name a folder that `patchkit bench MODEL` wrote"

Verdict = Literal["better", "worse", "within the spread", "too few"]


@positional
class Measure:
    """A figure in vLLM's result: its key, its name and unit for people, and what is better.

    A ``main`` figure is shown without -v.
    """

    key: str
    name: str
    unit: str
    better: Literal["more", "less"]
    main: bool


MEASURES = read_toml(tuple[Measure, ...], RECIPES / "bench.toml", key="measure")
MAIN = {measure.name for measure in MEASURES if measure.main}
_MORE = {measure.name for measure in MEASURES if measure.better == "more"}


@frozen
class Series:
    """The values of one figure, one value for each round, and their median."""

    load: str
    values: tuple[float, ...]
    figure: str
    unit: str
    median: float

    @property
    def text(self) -> str:
        """Return ``median (least-most)``, followed by ``!`` if there are too few repetitions."""
        spread = f"{min(self.values):.4g}-{max(self.values):.4g}"
        mark = " !" if len(self.values) < ENOUGH else ""
        return f"{self.median:.4g} ({spread}){mark}"


@frozen
class FigureDifference:
    """Compare two series of one figure: the ratio is the second median divided by the first."""

    first: Series
    second: Series
    ratio: float
    verdict: Verdict

    @property
    def text(self) -> str:
        """Return ``ratio (least-most)``: that of the medians, then the range of rounds' ratios."""
        pairs = zip(self.first.values, self.second.values, strict=False)
        ratios = [after / before for before, after in pairs]
        return f"{self.ratio:.3f} ({min(ratios):.3f}-{max(ratios):.3f})"


def result_file(folder: Path, load: str, number: int) -> Path:
    """Return the path of a round's result; ``number`` counts from 0, file names from 1."""
    return folder / _RAW / load / f"{number + 1}.json"


def result_files(folder: Path) -> list[Path]:
    """Return the result files in a folder, sorted by load and round."""
    places = folder.glob(f"{_RAW}/*/*.json")
    return sorted(places, key=lambda place: (place.parent, int(place.stem)))


def read_series(folder: Path) -> list[Series]:
    """Return the figures in a folder, a series for each load and measure.

    A series leaves out rounds without a positive value. Raises UsageError if there are no results,
    or if a file is no result of the benchmark.
    """
    results: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for place in result_files(folder):
        results[place.parent.name].append(_read_object(place))
    if not results:
        raise UsageError(f"{folder}: holds no results", hint=_RESULTS)

    all_series = []
    for load, rounds in results.items():
        for measure in MEASURES:
            numbers = (positive_number(result.get(measure.key)) for result in rounds)
            if values := tuple(filter(None, numbers)):
                series = Series(
                    load=load,
                    values=values,
                    figure=measure.name,
                    unit=measure.unit,
                    median=statistics.median(values),
                )
                all_series.append(series)
    return all_series


def _read_object(place: Path) -> Fields:
    try:
        return read_json(Fields, read_text(place, hint=_RESULTS))
    except RecordError as error:
        raise UsageError(f"{place}: {error}", hint=_RESULTS) from None


def read_conditions(folder: Path) -> Fields:
    """Return the setup in which a folder's figures were measured.

    Raises UsageError if its file is no JSON object.
    """
    return _read_object(folder / CONDITIONS)


def compare_series(
    first: Sequence[Series],
    second: Sequence[Series],
) -> list[FigureDifference]:
    """Pair the series of two folders that have the same load and figure."""
    partners = {(series.load, series.figure): series for series in second}
    pairs = [(series, partners.get((series.load, series.figure))) for series in first]
    return [
        FigureDifference(
            first=series,
            second=partner,
            ratio=partner.median / series.median,
            verdict=_judge(series, partner),
        )
        for series, partner in pairs
        if partner
    ]


def _judge(first: Series, second: Series) -> Verdict:
    """Return whether the second series is better; a difference counts if no values overlap.

    Two equal servers, with three repetitions each, differ like this by chance in one of ten
    comparisons: in 2 of the 20 orders of six values. The verdict says nothing about the cause.
    """
    before = first.values
    after = second.values
    if min(len(before), len(after)) < ENOUGH:
        return "too few"

    is_more = min(after) > max(before)
    is_less = max(after) < min(before)
    if not is_more and not is_less:
        return "within the spread"
    wants_more = first.figure in _MORE
    return "better" if is_more == wants_more else "worse"


def find_changes(
    before: object,
    after: object,
    at: str = "",
) -> list[Texts]:
    """Return a row for each difference of two setups: path, value before, value after.

    A path is as in ``loads.NAME.depth``, below ``at``; "" stands for a missing value.
    """
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        changes = []
        for key in sorted({*before, *after}):
            place = f"{at}.{key}".lstrip(".")
            changes += find_changes(before.get(key, ""), after.get(key, ""), place)
        return changes

    return [] if before == after else [(at, str(before), str(after))]
