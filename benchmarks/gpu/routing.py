"""Patched FP8 routing on a real GPU that reports 12.1, beside stock vLLM on the same GPU.

    python benchmarks/gpu/routing.py --stock STOCK --patched PATCHED --work DIR

STOCK and PATCHED are folders that hold ``vllm`` and its dist-info: the released wheel, and a copy
after ``patchkit apply --vllm-src PATCHED/vllm``. Everything else that vLLM needs is importable.
Each run is a process of its own. Exit code 0: every check held. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from models import SCALINGS, SHAPES, write_checkpoints

GENERATE = Path(__file__).with_name("generate.py")
TIMEOUT = (
    400  # seconds a run may take; Triton compiles for the first time in most of them
)
DEVICE = "12.1"
# run -> (which vLLM, capability reported, suffix of the checkpoint)
RUNS = {
    "stock": ("stock", "real", ""),
    "patched@12.1": ("patched", DEVICE, ""),
    "stock@12.1": ("stock", DEVICE, ""),
    "patched": ("patched", "real", ""),
    "bf16": ("stock", "real", "-bf16"),
}
# Kernels that the patched routing must avoid on 12.1, by class or backend name.
# The first two are for FP8, the last for NVFP4.
WANTED = {"tensor": "triton|torch", "block": "triton", "nvfp4": "marlin"}
UNWANTED = re.compile(r"cutlass|deep_?gemm|flashinfer", re.IGNORECASE)
# Launched kernels that multiply matrices; nvjet is cuBLAS, its first letters are the types.
MATRIX = re.compile(
    r"deep_gemm::\w+|cutlass\w*gemm\w*|_w8a8\w+|fused_moe_kernel|nvjet_[a-z0-9]+_[a-z]+|marlin\w*::Marlin|\w*xmma_gemm\w*"
)
SAID = re.compile(
    r"Selected \w+ for \w+|Using '?\w+'? (for NVFP4 GEMM|\w+ MoE backend)|patchkit: .*"
)


@dataclass(slots=True)
class Outcome:
    """What a run left behind; ``logprobs`` is (prompt positions, vocabulary)."""

    result: dict[str, Any]
    said: list[str] = field(default_factory=list)
    logprobs: numpy.ndarray | None = None

    @property
    def classes(self) -> str:
        """What computes the quantised layers, or all layers of an unquantised model."""
        found = dict.fromkeys(self.result.get("classes", {}).values())
        plain = [name for name in found if name.startswith("Unquantized")]
        quantised = [
            name for name in found if name not in plain and "KVCache" not in name
        ]
        return "; ".join(quantised or plain)


def main() -> int:
    """Run everything, print what was found, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stock", type=Path, required=True)
    parser.add_argument("--patched", type=Path, help="leave out to look at stock alone")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument(
        "--models", nargs="*", default=[f"{a}-{b}" for a in SHAPES for b in SCALINGS]
    )
    options = parser.parse_args()
    write_checkpoints(options.work / "models")
    sites = {"stock": options.stock, "patched": options.patched}
    wanted = [
        (model, name)
        for model in options.models
        for name in RUNS
        if sites[RUNS[name][0]]
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        done = pool.map(lambda pair: run(*pair, sites, options.work), wanted)
        outcomes = dict(zip(wanted, done, strict=True))
    header()
    failed = [
        problem
        for model in options.models
        for problem in report(
            model, {n: o for (m, n), o in outcomes.items() if m == model}
        )
    ]
    if options.patched:
        say(
            "\n| model | stock | stock, 12.1 | patched, 12.1 | s-b | p-s | p-b | same top |"
        )
        say("|---|---|---|---|---:|---:|---:|---:|")
        for model in options.models:
            say(
                table_row(model, {n: o for (m, n), o in outcomes.items() if m == model})
            )
    say("\n".join(["", *(failed or ["every check held"])]))
    return 1 if failed else 0


def run(model: str, name: str, sites: dict[str, Path], work: Path) -> Outcome:
    """One process; its log stays beside its result."""
    which, capability, suffix = RUNS[name]
    out = work / "runs" / model / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    paths = [str(sites[which]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DEEP_GEMM_WARMUP": "skip",  # compiles every shape that might come
        "HF_HUB_OFFLINE": "1",
    }
    checkpoint = work / "models" / f"{model}{suffix}"
    command = [sys.executable, str(GENERATE), "--model", str(checkpoint)]
    command += ["--capability", capability, "--out", str(out)]
    with (out / "log").open("w") as log:
        try:
            subprocess.run(
                command,
                env=environment,
                stdout=log,
                stderr=log,
                timeout=TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            log.write(f"\nstopped after {TIMEOUT} s\n")
    return gathered(out)


def gathered(out: Path) -> Outcome:
    """What a finished, failed or stopped run left in its folder."""
    log = (out / "log").read_text(errors="replace")
    said = [match[0] for line in log.splitlines() if (match := SAID.search(line))]
    result = {"error": (log.strip().splitlines() or ["no output"])[-1]}
    if (out / "result.json").exists():
        result = json.loads((out / "result.json").read_text())
    if (out / "selected.json").exists():
        result = {**json.loads((out / "selected.json").read_text()), **result}
    table = (
        numpy.load(out / "logprobs.npy") if (out / "logprobs.npy").exists() else None
    )
    return Outcome(result, list(dict.fromkeys(said)), table)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def header() -> None:
    """Device, driver and versions."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    say(
        subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    )
    versions = [f"python {sys.version.split()[0]}", f"CUDA {torch.version.cuda}"]
    packages = ("torch", "triton", "transformers")
    versions += [
        f"{package} {importlib.metadata.version(package)}" for package in packages
    ]
    say(", ".join(versions))


def report(model: str, outcomes: dict[str, Outcome]) -> list[str]:
    """Print one model; return what did not hold."""
    say(f"\n== {model}")
    for name, outcome in outcomes.items():
        state = outcome.result.get("error") or outcome.classes
        say(f"{name:13} {outcome.result.get('seconds', '?'):>6} s  {state}")
        for line in outcome.said:
            say(f"{'':14}log: {line}")
        if launched := matrix_kernels(outcome):
            counts = ", ".join(f"{kind} x{count}" for kind, count in launched.items())
            say(f"{'':14}ran: {counts}")
    problems = [
        f"{model} {name}: {o.result['error']}"
        for name, o in outcomes.items()
        if "error" in o.result and name != "stock@12.1"
    ]
    problems += [
        f"{model} {name}: log-probabilities that are not finite"
        for name, o in outcomes.items()
        if not o.result.get("finite", True)
    ]
    if problems:
        return problems
    return [
        f"{model}: {what}"
        for what in [*selection(model, outcomes), *agreement(outcomes)]
    ]


def matrix_kernels(outcome: Outcome) -> dict[str, int]:
    """The kinds of launched kernels that multiply matrices, and how often each ran."""
    kinds: Counter[str] = Counter()
    for name, count in outcome.result.get("launched", {}).items():
        if match := MATRIX.search(name):
            kinds[match[0]] += count
    return dict(kinds)


def selection(model: str, outcomes: dict[str, Outcome]) -> list[str]:
    """12.1 must get what is wanted, and only that; a real device exactly what stock gives it."""
    if "patched" not in outcomes:
        return []
    mine, problems = outcomes["patched@12.1"], []
    chosen = f"{mine.classes} {' '.join(matrix_kernels(mine))}"
    wanted = re.compile(WANTED[model.split("-")[1]], re.IGNORECASE)
    if UNWANTED.search(chosen) or not all(map(wanted.search, mine.classes.split("; "))):
        problems.append(f"12.1 gets {chosen}")
    if not any(line.startswith("patchkit: ") for line in mine.said):
        problems.append("the log does not say that patchkit rerouted")
    if mine.result["capability"] == outcomes["stock"].result["capability"]:
        return problems  # the device is a GB10: the patched run is meant to differ from stock
    same = [outcomes[name].result["classes"] for name in ("patched", "stock")]
    if same[0] != same[1] or any(
        "patchkit" in line for line in outcomes["patched"].said
    ):
        problems.append(f"a real device gets {outcomes['patched'].classes}")
    return problems


def agreement(outcomes: dict[str, Outcome]) -> list[str]:
    """The patched path may be no further from stock than two FP8 paths are from bfloat16.

    Distances are root mean squares of log-probability differences, a norm: if both paths are within
    d of the exact result, they are within 2 d of each other. d is what FP8 costs stock itself.
    """
    tables = {name: outcome.logprobs for name, outcome in outcomes.items()}
    stock, exact = tables["stock"], tables["bf16"]
    fp8 = distance(stock, exact)
    say(
        f"  rms Δlogprob: stock↔bf16 {fp8:.4f}, unrelated positions {shuffled(stock):.4f}"
    )
    problems = []
    for name in ("patched@12.1", "patched"):
        if (table := tables.get(name)) is None:
            continue
        apart, off = distance(table, stock), distance(table, exact)
        say(
            f"  {name}: ↔stock {apart:.4f} (limit {2 * fp8:.4f}), ↔bf16 {off:.4f}, "
            f"largest {numpy.abs(table - stock).max():.4f}, "
            f"same top token {agreeing(table, stock):.1%}, "
            f"greedy tokens equal {same_tokens(outcomes, name):.1%}"
        )
        if not (apart <= 2 * fp8 and off <= 2 * fp8):
            problems.append(
                f"{name} is {apart:.4f} from stock and {off:.4f} from bfloat16"
            )
    return problems


def table_row(model: str, outcomes: dict[str, Outcome]) -> str:
    """One row of the summary: kernels by capability, and distances of log-probabilities."""
    cells = [
        _kernels(outcomes[name]) for name in ("stock", "stock@12.1", "patched@12.1")
    ]
    names = ("stock", "patched@12.1", "bf16")
    tables = [outcomes[name].logprobs for name in names]
    if all(table is not None for table in tables):
        stock, mine, exact = tables
        pairs = ((stock, exact), (mine, stock), (mine, exact))
        cells += [f"{distance(*pair):.4f}" for pair in pairs]
        cells.append(f"{agreeing(mine, stock):.1%}")
    return f"| {model} | {' | '.join(cells)} |"


def _kernels(outcome: Outcome) -> str:
    names = re.findall(r"\w*LinearKernel|\w*MMKernel|(?<=backend=)\w+", outcome.classes)
    for line in [] if names else outcome.said:
        names += re.findall(r"(?:Selected|Using) '?(\w+)'?", line)
    shown = [re.sub(r"(ScaledMM)?(Linear)?Kernel$", "", name) for name in names]
    return ", ".join(dict.fromkeys(shown)) + (
        " (stops)" if "error" in outcome.result else ""
    )


def distance(a: numpy.ndarray, b: numpy.ndarray) -> float:
    return math.sqrt(float(((a - b) ** 2).mean()))


def shuffled(table: numpy.ndarray) -> float:
    """How far apart the probabilities of different positions are: what no agreement looks like."""
    return distance(table[1:], table[:-1])


def agreeing(a: numpy.ndarray, b: numpy.ndarray) -> float:
    return float((a.argmax(1) == b.argmax(1)).mean())


def same_tokens(outcomes: dict[str, Outcome], name: str) -> float:
    pairs = zip(
        outcomes[name].result["tokens"], outcomes["stock"].result["tokens"], strict=True
    )
    same = [a == b for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True)]
    return sum(same) / len(same)


if __name__ == "__main__":
    sys.exit(main())
