"""Put a server under one load with `vllm bench serve`, and keep what that says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import HostError, StorageError
from patchkit.process import run
from patchkit.reading import read_text
from patchkit.records import RecordError, read_json
from patchkit.runtime.bench.variants import BenchLoad

_LONGEST = 3600.0  # seconds of one measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchClient:
    """Who asks: the Python that has `vllm bench`; the server, its model, and whose tokenizer."""

    python: str
    url: str
    model: str
    tokenizer: str = ""
    variables: Mapping[str, str] | None = None

    def words(self, load: BenchLoad, place: Path, seed: int) -> tuple[str, ...]:
        """Return the command that writes its result to ``place``.

        Before it counts, as many requests as it will have at a time warm the server up. Prompts are
        drawn by ``seed``: one that was asked before would be answered from the prefix cache.
        Answers are as long as asked for, whatever the model says.
        """
        return (
            *(self.python, "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
            *("--backend", "openai", "--base-url", self.url, "--model", self.model),
            *(("--tokenizer", self.tokenizer) if self.tokenizer else ()),
            *("--dataset-name", "random", "--random-input-len", str(load.depth)),
            *("--random-output-len", str(load.output), "--ignore-eos", "--seed", str(seed)),
            *("--num-prompts", str(load.prompts), "--max-concurrency", str(load.concurrency)),
            *("--num-warmups", str(load.concurrency)),
            *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99"),
            *("--disable-tqdm", "--save-result", "--result-dir", str(place.parent)),
            *("--result-filename", place.name),
        )


def measure(client: BenchClient, load: BenchLoad, place: Path, seed: int) -> None:
    """Write the result of one load, whole or not at all.

    Raises HostError if the benchmark fails, or if not every request of it was answered.
    """
    part = place.with_suffix(".part")
    place.parent.mkdir(parents=True, exist_ok=True)
    run(
        *client.words(load, part, seed),
        env=client.variables,
        timeout=_LONGEST,
        why="vLLM's benchmark needs the Python that has vLLM, and the model's tokenizer",
        hint="--tokenizer DIR names the tokenizer of a model that is not on this machine",
    )
    try:
        completed = read_json(dict[str, object], read_text(part)).get("completed")
    except RecordError as error:
        raise StorageError(f"{part}: no result of the benchmark: {error}") from None
    if completed != load.prompts:
        raise HostError(
            f"{completed} of {load.prompts} requests were answered",
            why="the server refused or broke the others: a prompt too long, or an engine that died",
            hint="patchkit doctor",
        )
    part.replace(place)
