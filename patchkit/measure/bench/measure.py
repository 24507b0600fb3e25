"""Put a server under one load with a benchmark that exists, and keep what that says."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import HostError, StorageError
from patchkit.measure.bench.variants import BenchLoad
from patchkit.process import attempt, run
from patchkit.reading import read_text
from patchkit.records import RecordError, read_json

_LONGEST = 3600.0  # seconds of one measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchClient:
    """Who asks: the Python that has vLLM; the server, its model, and whose tokenizer."""

    python: str
    url: str
    model: str
    tokenizer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTool:
    """A benchmark: its command, which writes to a place, and what is wrong with that.

    ``program`` begins the command, for the Python that has it; raises HostError if nothing has.
    """

    name: str
    needs: str
    program: Callable[[str], tuple[str, ...]]
    words: Callable[[BenchClient, BenchLoad, Path, int], tuple[str, ...]]
    trouble: Callable[[Mapping[str, object], BenchLoad], str]


def measure(tool: BenchTool, client: BenchClient, load: BenchLoad, place: Path, seed: int) -> None:
    """Write the result of one load, whole or not at all.

    Raises HostError if the benchmark fails, or if not every request of it was answered.
    """
    part = place.with_suffix(".part")
    place.parent.mkdir(parents=True, exist_ok=True)
    run(
        *tool.program(client.python),
        *tool.words(client, load, part, seed),
        timeout=_LONGEST,
        why=tool.needs,
        hint="--tokenizer DIR names the tokenizer of a model that is not on this machine",
    )
    try:
        found = read_json(dict[str, object], read_text(part))
    except RecordError as error:
        raise StorageError(f"{part}: no result of the benchmark: {error}") from None
    if trouble := tool.trouble(found, load):
        raise HostError(
            trouble,
            why="the server refused or broke the others: a prompt too long, or an engine that died",
            hint="patchkit doctor",
        )
    part.replace(place)


def _vllm_program(python: str) -> tuple[str, ...]:
    if attempt(python, "-c", "import importlib.util as u; u.find_spec('vllm').name").trouble:
        raise HostError(
            f"vllm bench serve is not here: {python} has no vLLM",
            why="it asks from this machine, wherever the server is, and is a part of vLLM",
            hint=f"name an environment here that has it: --venv DIR; or: uv tool install {BENCHY}, "
            f"then --tool {BENCHY}",
        )
    return (python, "-m", "vllm.entrypoints.cli.main", "bench", "serve")


def _vllm_words(client: BenchClient, load: BenchLoad, place: Path, seed: int) -> tuple[str, ...]:
    """Return the options of `vllm bench serve`.

    Before it counts, as many requests as it will have at a time warm the server up. Prompts are
    drawn by ``seed``: one that was asked before would be answered from the prefix cache. Answers
    are as long as asked for, whatever the model says.
    """
    return (
        *("--backend", "openai", "--base-url", client.url, "--model", client.model),
        *(("--tokenizer", client.tokenizer) if client.tokenizer else ()),
        *("--dataset-name", "random", "--random-input-len", str(load.depth)),
        *("--random-output-len", str(load.output), "--ignore-eos", "--seed", str(seed)),
        *("--num-prompts", str(load.prompts), "--max-concurrency", str(load.concurrency)),
        *("--num-warmups", str(load.concurrency)),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99"),
        *("--disable-tqdm", "--save-result", "--result-dir", str(place.parent)),
        *("--result-filename", place.name),
    )


def _vllm_trouble(found: Mapping[str, object], load: BenchLoad) -> str:
    completed = found.get("completed")
    if completed == load.prompts:
        return ""
    return f"{completed} of {load.prompts} requests were answered"


def _benchy_program(python: str) -> tuple[str, ...]:
    beside = Path(python).with_name(BENCHY)
    program = str(beside) if beside.exists() else shutil.which(BENCHY)
    if program is None:
        raise HostError(f"{BENCHY} is not installed", hint=f"uv tool install {BENCHY}")
    return (program,)


def _benchy_words(client: BenchClient, load: BenchLoad, place: Path, _seed: int) -> tuple[str, ...]:
    """Return the options of llama-benchy, which warms up by itself."""
    batches = max(1, load.prompts // load.concurrency)
    return (
        *("--base-url", f"{client.url}/v1", "--model", client.model),
        *(("--tokenizer", client.tokenizer) if client.tokenizer else ()),
        *("--pp", str(load.depth), "--tg", str(load.output), "--exact-tg"),
        *("--concurrency", str(load.concurrency), "--runs", str(batches)),
        # A test that its answers make sense is `patchkit doctor --ask`.
        *("--latency-mode", "generation", "--no-cache", "--skip-coherence"),
        *("--no-results-on-fail", "--format", "json", "--save-result", str(place)),
    )


def _benchy_trouble(found: Mapping[str, object], _load: BenchLoad) -> str:
    # Of a request that failed it writes no result. Tokens that come all at once have no rate.
    match found:
        case {"benchmarks": [{"e2e_ttft": {"mean": float()}}]}:
            return ""
    return "no request was answered"


VLLM, BENCHY = "vllm", "llama-benchy"
TOOLS = {
    VLLM: BenchTool(
        name="vllm bench serve",
        needs="it needs the model's tokenizer",
        program=_vllm_program,
        words=_vllm_words,
        trouble=_vllm_trouble,
    ),
    BENCHY: BenchTool(
        name=BENCHY,
        needs="it needs the model's tokenizer, and downloads a book for its prompts, once",
        program=_benchy_program,
        words=_benchy_words,
        trouble=_benchy_trouble,
    ),
}
"""The benchmarks that can be asked for, by name; the first is the default."""
