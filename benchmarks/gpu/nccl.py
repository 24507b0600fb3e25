"""A libnccl wheel of ours beside stock's, installed in turn under one torch, on all GPUs here.

    python benchmarks/gpu/nccl.py --stock STOCK.whl --ours OURS.whl [--rounds 5] [--out FOLDER]

Both wheels are installed with pip into the environment that runs this, one after the other in every
round, as a user would; what was installed before is not put back. Each measurement is a process per
GPU of its own. Exit code 0: results are right and bit-identical, one libnccl is mapped, and ours
reaches 98 % of stock's bus bandwidth at every size. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

CONSOLE = Console(highlight=False, soft_wrap=True)
MEMBER = "nvidia/nccl/lib/libnccl.so.2"
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
SIZES = tuple(4096 << shift for shift in range(0, 19, 2))  # bytes: 4 KiB to 1 GiB
CHECKED = 1 << 20  # elements per rank
REPEATS = 9
WANTED = 0.98  # of stock's bandwidth
# Largest relative error of a float32 sum against float64: a few roundings of 2^-24.
TOLERANCE = {"float32": 1e-6, "bfloat16": 1.6e-2}


def main() -> int:
    """Measure in turns, compare, print the tables; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stock", type=Path)
    parser.add_argument("--ours", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(json.loads(args.worker))
    wheels = {"stock": args.stock, "ours": args.ours}
    runs = {name: [] for name in wheels}
    for number in range(args.rounds):
        # Neither is always the first: clocks and caches warm up.
        for name in sorted(wheels, reverse=number % 2 == 0):
            install(wheels[name])
            runs[name].append(measure(check=number == 0))
            CONSOLE.print(f"round {number + 1}: {name} measured")
    faults = [*mapped_faults(wheels, runs), *result_faults(runs), *speed_faults(runs)]
    text = "\n".join(
        [*correctness(runs), "", *table(runs), "", *(faults or ["every check held"])]
    )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "nccl.json").write_text(json.dumps(runs, indent=1) + "\n")
    (args.out / "nccl.md").write_text(text + "\n")
    CONSOLE.print(text, markup=False)
    return 1 if faults else 0


def install(wheel: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
    ]
    subprocess.run([*command, "--force-reinstall", str(wheel)], check=True)


def measure(*, check: bool) -> dict:
    """One process per GPU; what rank 0 found."""
    world = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        job = {"folder": folder, "world": world, "check": check}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", json.dumps({**job, "rank": r})]
            )
            for r in range(world)
        ]
        codes = [process.wait() for process in ranks]
        if any(codes):
            raise SystemExit(f"a rank failed: {codes}")
        found = [
            json.loads((Path(folder) / f"{r}.json").read_text()) for r in range(world)
        ]
    return {**found[0], "mapped": [each["mapped"] for each in found]}


def worker(job: dict) -> int:
    rank, world = job["rank"], job["world"]
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{job['folder']}/rendezvous",
        rank=rank,
        world_size=world,
    )
    found = {
        "version": loaded_version(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(world)],
        "torch": torch.__version__,
        "checks": checks(rank, world) if job["check"] else {},
        "busbw": {
            op: {str(n): bandwidth(op, n, world) for n in SIZES} for op in OPERATIONS
        },
        "mapped": mapped(),
    }
    (Path(job["folder"]) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def run(operation: str, full: torch.Tensor, part: torch.Tensor) -> None:
    """One collective: ``full`` holds world times as many elements as ``part``."""
    if operation == "all_reduce":
        dist.all_reduce(full)
    elif operation == "all_gather":
        dist.all_gather_into_tensor(full, part)
    else:
        dist.reduce_scatter_tensor(part, full)


def checks(rank: int, world: int) -> dict:
    """Largest relative error against float64 and a digest of the result, by operation and type."""
    found = {}
    for operation, dtype in itertools.product(OPERATIONS, TOLERANCE):
        kind, shape = getattr(torch, dtype), (world, CHECKED // world)
        # Every rank draws all ranks' numbers, so the exact result needs no communication.
        generator = torch.Generator().manual_seed(2026)
        drawn = [torch.randn(shape, generator=generator).to(kind) for _ in range(world)]
        exact = torch.stack([each.double() for each in drawn])
        full, part = drawn[rank].cuda(), drawn[rank][rank].cuda().contiguous()
        run(operation, full, part)
        got, wanted = (
            (part if operation == "reduce_scatter" else full).cpu(),
            exact.sum(0),
        )
        if operation == "all_gather":
            wanted = torch.stack([exact[i, i] for i in range(world)])
        elif operation == "reduce_scatter":
            wanted = wanted[rank]
        error = ((got.double() - wanted).abs().max() / exact.abs().sum(0).max()).item()
        digest = hashlib.sha256(got.view(torch.uint8).numpy().tobytes()).hexdigest()
        found[f"{operation} {dtype}"] = {"error": error, "sha256": digest}
    return found


def bandwidth(operation: str, size: int, world: int) -> float:
    """Bus bandwidth in GB/s as nccl-tests define it; ``size`` is the larger buffer's, in bytes."""
    full = torch.zeros(size // 2, dtype=torch.bfloat16, device="cuda").view(world, -1)
    part = torch.zeros_like(full[0])
    loops = max(5, min(200, (1 << 28) // size))
    for _ in range(5):
        run(operation, full, part)
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(loops):
            run(operation, full, part)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / loops)
    factor = (2 if operation == "all_reduce" else 1) * (world - 1) / world
    return size * factor / statistics.median(times) / 1e9


def loaded_version() -> int:
    """ncclGetVersion of the library that torch took; torch itself tells what it was built with."""
    version = ctypes.c_int()
    ctypes.CDLL(next(iter(mapped()))).ncclGetVersion(ctypes.byref(version))
    return version.value


def mapped() -> dict[str, str]:
    """Every libnccl in this process, and its sha256."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "libnccl" in line}
    return {
        path: hashlib.sha256(Path(path).read_bytes()).hexdigest()
        for path in sorted(paths)
    }


def mapped_faults(wheels: dict, runs: dict) -> list[str]:
    faults = []
    for name, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as bundle:
            digest = hashlib.sha256(bundle.read(MEMBER)).hexdigest()
        ranks = itertools.chain.from_iterable(found["mapped"] for found in runs[name])
        wrong = [each for each in ranks if list(each.values()) != [digest]]
        faults += [f"{name}: mapped {each}, the wheel has {digest}" for each in wrong]
    return faults


def result_faults(runs: dict) -> list[str]:
    stock, ours = (runs[name][0]["checks"] for name in ("stock", "ours"))
    faults = [] if stock else ["nothing was checked"]
    for key, found in ours.items():
        if found["error"] > TOLERANCE[key.split()[1]]:
            faults.append(f"{key}: relative error {found['error']:.1e}")
        if found["sha256"] != stock[key]["sha256"]:
            faults.append(f"{key}: not the bits that stock gives")
    return faults


def ratio(runs: dict, operation: str, size: int) -> tuple[float, float, float]:
    """Medians over the rounds in GB/s, stock's and ours, and ours by stock's."""
    medians = [
        statistics.median(found["busbw"][operation][str(size)] for found in runs[name])
        for name in ("stock", "ours")
    ]
    return medians[0], medians[1], medians[1] / medians[0]


def speed_faults(runs: dict) -> list[str]:
    return [
        f"{operation} of {size} bytes: {found:.3f} of stock's bandwidth"
        for operation, size in itertools.product(OPERATIONS, SIZES)
        if (found := ratio(runs, operation, size)[2]) < WANTED
    ]


def correctness(runs: dict) -> list[str]:
    first = runs["ours"][0]
    head = f"{len(first['gpus'])} x {first['gpus'][0]}, torch {first['torch']}, "
    rows = [
        f"| {key} | {found['error']:.1e} | {runs['stock'][0]['checks'][key]['error']:.1e} |"
        for key, found in first["checks"].items()
    ]
    names = "| operation | ours | stock |"
    return [f"{head}NCCL {first['version']}", "", names, "|---|---|---|", *rows]


def table(runs: dict) -> list[str]:
    lines = [
        "| bytes | " + " | ".join(f"{op} | stock | ratio" for op in OPERATIONS) + " |"
    ]
    lines.append("|---" * (1 + 3 * len(OPERATIONS)) + "|")
    for size in SIZES:
        cells = []
        for operation in OPERATIONS:
            stock, ours, part = ratio(runs, operation, size)
            cells.append(f"{ours:.3g} | {stock:.3g} | {part:.3f}")
        lines.append(f"| {size} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    sys.exit(main())
