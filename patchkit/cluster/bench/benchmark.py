"""Run vLLM's own benchmark against a server, for one load."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from patchkit.errors import HostError, StorageError
from patchkit.frozen import Fields, frozen
from patchkit.process import run
from patchkit.reading import read_text
from patchkit.records import RecordError, read_json
from patchkit.runtime.python.startup import VLLM

_LONGEST_MEASUREMENT = 3600.0  # seconds


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
class Benchmark:
    """The settings of one run: a load, a server at ``url``, and the Python whose vLLM asks it.

    ``tokenizer`` is a folder or the name of a model. ``seed`` determines the random prompts,
    ``seconds`` is the time limit of the run.
    """

    python: str
    url: str
    model: str
    tokenizer: str
    load: BenchLoad
    seed: int = 0
    seconds: float = _LONGEST_MEASUREMENT


def run_benchmark(benchmark: Benchmark, place: Path) -> Fields:
    """Run `vllm bench serve`; write its result to ``place``, complete or not at all, and return it.

    Raises HostError if the benchmark fails, or if a request was not answered; StorageError if the
    benchmark left no readable result.
    """
    part = place.with_suffix(".part")
    place.parent.mkdir(parents=True, exist_ok=True)
    run(
        benchmark.python,
        *VLLM,
        *_bench_words(benchmark, part),
        timeout=benchmark.seconds,
        why="it needs the model's tokenizer",
        hint="--tokenizer DIR names the tokenizer of a model that is not on this machine",
    )

    try:
        result = read_json(Fields, read_text(part))
    except RecordError as error:
        raise StorageError(f"{part}: no result of the benchmark: {error}") from None
    completed = result.get("completed")
    if completed != benchmark.load.prompts:
        raise HostError(
            f"{completed} of {benchmark.load.prompts} requests were answered",
            why="the server refused or broke the others: a prompt too long, or an engine that died",
            hint="patchkit doctor",
        )
    part.replace(place)
    return result


def _bench_words(benchmark: Benchmark, part: Path) -> list[str]:
    """Return the words of the command line after `vllm`.

    The seed gives each round other prompts, since the prefix cache may hold those of an earlier
    round.
    """
    load = benchmark.load
    options = {
        "--backend": "openai",
        "--base-url": benchmark.url,
        "--model": benchmark.model,
        "--tokenizer": benchmark.tokenizer,
        "--dataset-name": "random",
        "--random-input-len": str(load.depth),
        "--random-output-len": str(load.output),
        "--seed": str(benchmark.seed),
        "--num-prompts": str(load.prompts),
        "--max-concurrency": str(load.concurrency),
        "--percentile-metrics": "ttft,tpot,itl,e2el",
        "--metric-percentiles": "50,90,99",
        "--result-dir": str(part.parent),
        "--result-filename": part.name,
    }
    words = ["bench", "serve", "--ignore-eos", "--disable-tqdm", "--save-result"]
    words += chain.from_iterable(options.items())
    return words
