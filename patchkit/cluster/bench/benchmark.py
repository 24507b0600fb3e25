"""Run vLLM's own benchmark against a server, for one load."""

from dataclasses import field
from pathlib import Path

from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.errors import HostError, StorageError
from patchkit.frozen import Fields, Texts, Values, frozen
from patchkit.process import run
from patchkit.reading import read_text
from patchkit.records import RECIPES, RecordError, read_json, read_toml
from patchkit.runtime.python.startup import VLLM

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
