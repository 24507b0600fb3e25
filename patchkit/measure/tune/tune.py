"""Tune fused-MoE configs for the present GPU, measured against what the release does untuned.

The release's own benchmark measures, the release names the file and gives the search space; here
the space is cut to what the device can run, walked within a budget, and the result is compared
with the untuned config in alternation before it goes into a file.
"""

from __future__ import annotations

import ast
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from packaging.version import Version

from patchkit.durable.signals import Interrupted
from patchkit.errors import DriftError, HostError, SourceError, UsageError
from patchkit.measure.tune.process import Measuring, StalledError
from patchkit.measure.tune.search import Config, nearest, shared_memory, suited, walk
from patchkit.units import BYTES_PER_GIB

BENCHMARK = "benchmarks/kernels/benchmark_moe.py"
ELEMENT_BYTES = {"fp8_w8a8": 1, "auto": 2}
# Batch sizes of upstream's own files, thinned out: a lookup takes the nearest row, so a file
# without rows for prefill would make prefill use a row made for decoding.
GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_SEARCH_SHARE = 0.7  # of a batch size's time; the rest is for comparing
_SEARCH_ITERATIONS, _FINAL_ITERATIONS = 20, 50
_LEAST_TURNS = 3  # of a comparison, whatever the budget: fewer show no spread
_START = 300.0  # seconds for importing vLLM
_GRACE = 60.0  # seconds past the budget after which a measurement is given up
# What benchmark_config has been called with since 0.11.1; more is fine if it has a default.
_ARGUMENTS = [
    "config",
    "num_tokens",
    "num_experts",
    "shard_intermediate_size",
    "hidden_size",
    "topk",
    "dtype",
    "use_fp8_w8a8",
    "use_int8_w8a16",
    "num_iters",
    "block_quant_shape",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One fused-MoE layer and how long to look; ``intermediate`` is one GPU's share."""

    experts: int
    intermediate: int
    hidden: int
    topk: int
    dtype: str = "fp8_w8a8"
    block_shape: tuple[int, int] | None = None
    batch_sizes: tuple[int, ...] = GRID
    budget: float = 1800.0
    most: int = 100
    repeats: int = 5

    def check(self) -> None:
        """Raise UsageError for a shape that no kernel takes."""
        sizes = [self.experts, self.intermediate, self.hidden, self.topk, *self.batch_sizes]
        if min(sizes) < 1 or self.topk > self.experts:
            raise UsageError("sizes must be positive, and --topk at most --experts")
        if self.dtype not in ELEMENT_BYTES:
            raise UsageError(f"no dtype {self.dtype!r}", hint=f"one of {', '.join(ELEMENT_BYTES)}")
        if self.block_shape and self.dtype != "fp8_w8a8":
            raise UsageError("--block-shape is for --dtype fp8_w8a8")
        if len(set(self.batch_sizes)) < len(self.batch_sizes):
            raise UsageError("a batch size is named twice")

    def weight_bytes(self) -> int:
        """Return the bytes of the weights: 16-bit values, and for FP8 a copy in FP8 beside them."""
        per_value = 3 if self.dtype == "fp8_w8a8" else 2  # bytes
        # Three matrices: gate, up and down.
        return self.experts * 3 * self.intermediate * self.hidden * per_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One batch size: microseconds of ``untuned`` and ``tuned``, measured in alternation.

    ``untuned`` is what the release uses today: its packaged file (``source`` is "shipped") or its
    default heuristic. Empty times mean that the config cannot run here.
    """

    batch_size: int
    source: str
    untuned: Config
    tuned: Config
    untuned_times: tuple[float, ...]
    tuned_times: tuple[float, ...]
    measured: int
    complete: bool

    @property
    def faster(self) -> bool:
        """Return whether the tuned median is below every time of the untuned config."""
        limit = min(self.untuned_times, default=math.inf)
        return median(self.tuned_times) < limit

    @property
    def ratio(self) -> float:
        """Return untuned over tuned: above 1 is a gain."""
        return median(self.untuned_times) / median(self.tuned_times)

    @property
    def chosen(self) -> Config:
        return self.tuned if self.faster else self.untuned


@dataclass(slots=True)
class Tuned:
    """The result of a run; ``stopped`` says why batch sizes are missing."""

    facts: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    stopped: str = ""

    @property
    def complete(self) -> bool:
        return not self.stopped and all(row.complete for row in self.rows)


Progress = Callable[[int, str], None]  # batch size, what is going on


class VllmSources(Protocol):
    """The part of a SourceTree that tuning needs; that class is in another wing."""

    @property
    def root(self) -> Path: ...
    @property
    def kind(self) -> str: ...
    @property
    def version(self) -> Version: ...
    def read(self, path: str) -> str: ...


def check_benchmark(tree: VllmSources) -> Path:
    """Return the release's benchmark_moe.py. Raises UsageError or DriftError for an unfit one."""
    if tree.kind == "installed":
        raise UsageError(
            f"{tree.root}: an installed vLLM has no {BENCHMARK}",
            why="wheels carry no benchmarks",
            hint=f"--vllm-src vllm=={tree.version.public}; the installed one is what --python sees",
        )
    functions = {
        node.name: node.args
        # Parsed, not imported: importing it would need vLLM and a GPU.
        for node in ast.parse(tree.read(BENCHMARK)).body
        if isinstance(node, ast.FunctionDef)
    }
    for name, wanted in (
        ("benchmark_config", _ARGUMENTS),
        ("get_configs_compute_bound", ["use_fp16", "block_quant_shape"]),
    ):
        if name not in functions:
            raise DriftError(f"{BENCHMARK}: defines no {name}", why="upstream reworked its tuner")
        _check_call(name, functions[name], wanted)
    return tree.root / BENCHMARK


def _check_call(name: str, arguments: ast.arguments, given: list[str]) -> None:
    names = [argument.arg for argument in arguments.args]
    required = names[: len(names) - len(arguments.defaults)]
    missing, unknown = set(required) - set(given), set(given) - set(names)
    if missing or unknown:
        raise DriftError(
            f"{BENCHMARK}: {name}({', '.join(names)}) is not called as before",
            why=f"new: {', '.join(sorted(missing)) or 'nothing'}; "
            f"gone: {', '.join(sorted(unknown)) or 'nothing'}",
            hint="use the release's own --tune, or a patchkit that knows this release",
        )


def connect(bench: Measuring, job: Job, tree: VllmSources) -> dict[str, Any]:
    """Return facts of device and release. Raises HostError, SourceError for another vLLM."""
    request = {
        "benchmark": str(check_benchmark(tree)),
        "experts": job.experts,
        "intermediate": job.intermediate,
        "hidden": job.hidden,
        "topk": job.topk,
        "dtype": job.dtype,
        "block_shape": job.block_shape,
        # Also those of GRID: the file has untuned rows for them.
        "batch_sizes": sorted({*job.batch_sizes, *GRID}),
    }
    try:
        facts = bench.ask(request, _START)
    except StalledError:
        raise HostError(f"vLLM was not imported within {_START:.0f} s") from None
    for key in ("defaults", "shipped"):
        # Keys of JSON are texts.
        facts[key] = {int(size): config for size, config in (facts[key] or {}).items()}
    # Wheels of one release differ in their local part.
    if Version(facts["vllm"]).base_version != tree.version.base_version:
        raise SourceError(
            f"the installed vLLM is {facts['vllm']}, the source {tree.version}",
            hint=f"--vllm-src vllm=={Version(facts['vllm']).public}, or another --python",
        )
    if job.weight_bytes() > 0.9 * facts["memory"]:
        raise HostError(
            f"the weights take {job.weight_bytes() / BYTES_PER_GIB:.0f} GiB, the device has "
            f"{facts['memory'] / BYTES_PER_GIB:.0f} GiB",
            hint="--intermediate is one GPU's share: divide it by the tensor parallel size",
        )
    return facts


def tune(bench: Measuring, job: Job, facts: dict[str, Any], progress: Progress) -> Tuned:
    """Search and compare, batch size by batch size, within the budget.

    An interrupt keeps the batch sizes that were compared, wherever between two of them it comes.
    """
    outcome, deadline = Tuned(facts), time.monotonic() + job.budget
    try:
        for index, size in enumerate(job.batch_sizes):
            left = deadline - time.monotonic()
            if left <= 0:
                outcome.stopped = "the budget was spent"
                break
            # What one batch size leaves of its time goes to those after it.
            until = time.monotonic() + left / (len(job.batch_sizes) - index)
            row = _row(_Timer(bench, size, deadline), job, facts, until, progress)
            outcome.rows.append(row)
    except (StalledError, HostError) as error:
        outcome.stopped = str(error) or "a measurement did not end within the budget"
    except (KeyboardInterrupt, Interrupted):
        outcome.stopped = "interrupted"
    return outcome


@dataclass(frozen=True, slots=True)
class _Timer:
    """A timer of configs for one batch size."""

    bench: Measuring
    batch_size: int
    deadline: float

    def time(self, config: Config, iterations: int) -> float:
        """Return microseconds; infinity if the device cannot run the config."""
        request = {"batch_size": self.batch_size, "config": config, "iterations": iterations}
        answer = self.bench.ask(request, self.deadline + _GRACE - time.monotonic())
        return float(answer.get("microseconds", math.inf))


def _row(timer: _Timer, job: Job, facts: dict[str, Any], until: float, progress: Progress) -> Row:
    size = timer.batch_size
    source, untuned = untuned_config(facts, size)
    space = suited(
        facts["space"],
        rows_per_expert=size * job.topk / job.experts,
        limit=facts["shared_memory"],
        element_bytes=ELEMENT_BYTES[job.dtype],
    )
    progress(size, f"up to {min(job.most, len(space))} of {len(facts['space'])} configs")
    search_end = time.monotonic() + _SEARCH_SHARE * (until - time.monotonic())
    found = walk(
        space,
        nearest(space, untuned),
        lambda config: timer.time(config, _SEARCH_ITERATIONS),
        most=job.most,
        expired=lambda: time.monotonic() > search_end,
    )
    if found.config is None:
        raise HostError(f"none of {found.measured} configs runs for batch size {size}")
    times = compared(timer, (untuned, found.config), job.repeats, until)
    return Row(
        batch_size=size,
        source=source,
        untuned=untuned,
        tuned=found.config,
        untuned_times=times[0],
        tuned_times=times[1],
        measured=found.measured,
        complete=found.complete,
    )


def untuned_config(facts: Mapping[str, Any], size: int) -> tuple[str, Config]:
    """Return the release's own config: the nearest row of its packaged file, or its default."""
    shipped: Mapping[int, Config] = facts["shipped"]
    if shipped:
        return "shipped", shipped[min(shipped, key=lambda row: abs(row - size))]
    return "default", facts["defaults"][size]


def compared(
    timer: _Timer, configs: tuple[Config, ...], repeats: int, until: float
) -> list[tuple[float, ...]]:
    """Return times of each config, taken in turns so that clocks and heat affect them alike."""
    times: list[list[float]] = [[] for _ in configs]
    for turn in range(repeats):
        if turn >= _LEAST_TURNS and time.monotonic() > until:
            break
        for config, series in zip(configs, times, strict=True):
            series.append(timer.time(config, _FINAL_ITERATIONS))
    # A config that failed once has no times: a median of the rest would flatter it.
    return [tuple(series) if math.isfinite(max(series)) else () for series in times]


def file_rows(outcome: Tuned, element_bytes: int) -> dict[int, Config]:
    """Return the rows of the file: what was measured, and for the rest what is untuned."""
    facts = outcome.facts
    untuned = facts["shipped"] or {size: facts["defaults"][size] for size in GRID}
    rows = {**untuned, **{row.batch_size: row.chosen for row in outcome.rows}}
    return {
        size: config
        for size, config in sorted(rows.items())
        # vLLM takes the nearest row: none may be there that this device cannot run.
        if shared_memory(config, element_bytes) <= facts["shared_memory"]
    }


def file_text(outcome: Tuned, element_bytes: int) -> str:
    """Return the file as vLLM reads it."""
    rows = {str(size): dict(config) for size, config in file_rows(outcome, element_bytes).items()}
    return json.dumps({"triton_version": outcome.facts["triton"], **rows}, indent=4) + "\n"


def median(times: tuple[float, ...]) -> float:
    """Return the median; infinity for a config that did not run."""
    return statistics.median(times) if times else math.inf


def row_fields(rows: list[Row]) -> Iterator[dict[str, Any]]:
    """Yield rows for JSON."""
    for row in rows:
        yield {
            "batch_size": row.batch_size,
            "untuned": {
                "source": row.source,
                "config": row.untuned,
                "microseconds": row.untuned_times,
            },
            "tuned": {"config": row.tuned, "microseconds": row.tuned_times},
            "ratio": row.ratio if row.untuned_times else None,
            "chosen": "tuned" if row.faster else "untuned",
            "configs_measured": row.measured,
            "search_complete": row.complete,
        }
