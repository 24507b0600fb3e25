"""How long patchkit takes: cold processes, warm page cache, medians of one run.

Beside it stand a peer (``git apply`` of the same change), the floor (a Python that only imports
libcst), and what libcst needs to parse the Python files that an apply edits. What ``apply`` takes
beyond ``apply --trust-source`` is the sandbox's share. For the inspection of
the largest stock NCCL the floor is a Python that hashes the file, the peer NVIDIA's cuobjdump. For
what a node runs, probe and env, the floor is a Python that imports click. For `doctor --log` it is
grep that looks for one word in the same 100 MB.
"""

from __future__ import annotations

import argparse
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import libcst
from rich.console import Console
from rich.table import Table

from patchkit.source.fetch import fetch
from patchkit.source.releases import LockEntry

RELEASES = ("0.19.1", "0.33.0")
PATCHKIT = (sys.executable, "-m", "patchkit")
FLOOR = (sys.executable, "-c", "import libcst")
CLICK = (sys.executable, "-c", "import click")
NODE = {
    "probe": ("probe",),
    "env --role single": ("env", "--role", "single", "--vllm", "0.33.0"),
    "env explain": ("env", "explain"),
    "serve-args": ("serve-args", "Qwen/Qwen2.5-7B-Instruct", "--vllm", "0.33.0"),
}
SERVED = '(APIServer pid=7) INFO:     127.0.0.1:50312 - "POST /v1/completions HTTP/1.1" 200 OK\n'
LOADED = (
    "(EngineCore_DP0 pid=8) INFO 11-22 10:11:12 [loggers.py:123] Engine 000: Avg prompt speed: "
    "812.0 tokens/s, Running: 3 reqs, Waiting: 0 reqs, GPU KV cache usage: 1.2%\n"
)
FAILED = "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory"
HASH = (
    "import hashlib, sys; "
    "print(hashlib.file_digest(open(sys.argv[1], 'rb'), 'sha256').hexdigest())"
)
WHEELS = Path(__file__).parents[1] / "tests" / "data" / "wheels.toml"
NCCL = ("nvidia-nccl-cu13", "2.32.3")


def main() -> None:
    """Measure and print a table per release."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", "--runs", type=int, default=9)
    parser.add_argument("--node", action="store_true", help="only what a node runs")
    parser.add_argument("--log", action="store_true", help="only what reads a log")
    arguments = parser.parse_args()
    runs = arguments.runs
    if not arguments.log:
        measure_node(runs)
    if arguments.node:
        return
    with tempfile.TemporaryDirectory() as folder:
        measure_log(Path(folder) / "vllm.log", runs)
    if arguments.log:
        return
    with tempfile.TemporaryDirectory() as folder:
        for release in RELEASES:
            measure(release, Path(folder) / release, runs)
        measure_inspection(Path(folder), runs)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    Console().print(f"largest process: {peak:.0f} MiB")


def measure(release: str, tree: Path, runs: int) -> None:
    """One table: seconds, and the ratio to the floor."""
    run(*PATCHKIT, "fetch", f"vllm=={release}", "--dest", str(tree))
    source = ("--vllm-src", str(tree))
    patch = tree.with_suffix(".patch")
    patch.write_text(run(*PATCHKIT, "diff", *source))
    rows: dict[str, list[float]] = {}
    for _ in range(runs):
        note = recorder(rows)
        note("floor: import libcst", FLOOR)
        note("apply --trust-source", (*PATCHKIT, "apply", *source, "--trust-source"))
        run(*PATCHKIT, "revert", *source)
        note("apply", (*PATCHKIT, "apply", *source))
        rows.setdefault("parsing what apply edits", []).append(
            timed(lambda: parse(changed(tree)))
        )
        note("apply again", (*PATCHKIT, "apply", *source))
        note("status", (*PATCHKIT, "fixes", *source))
        note("revert", (*PATCHKIT, "revert", *source))
        note("status of an unpatched tree", (*PATCHKIT, "fixes", *source))
        note("git apply", ("git", "-C", str(tree), "apply", str(patch)))
        run("git", "-C", str(tree), "apply", "--reverse", str(patch))
    show(f"vLLM {release}", rows)
    shutil.rmtree(tree)


def measure_node(runs: int) -> None:
    """One table: the verbs that a node runs, each a cold process."""
    rows: dict[str, list[float]] = {}
    note = recorder(rows)
    for _ in range(runs):
        note("floor: import click", CLICK)
        for name, arguments in NODE.items():
            note(name, (*PATCHKIT, *arguments))
    show("A node", rows)


def measure_log(log: Path, runs: int) -> None:
    """One table: a log of 100 MB as a server writes it, and one where every line is an error."""
    rows: dict[str, list[float]] = {}
    note = recorder(rows, codes=(0, 1, 9))  # grep found nothing; doctor found something
    noisy = log.with_name("noisy.log")
    with log.open("w") as healthy, noisy.open("w") as bad:
        for number in range(100_000_000 // (len(SERVED) + len(LOADED)) + 1):
            healthy.write(SERVED + LOADED)
            bad.write(f"(Worker pid=7) ERROR {FAILED} of {number}\n" * 2)
    for _ in range(runs):
        note("floor: grep of one word", ("grep", "-c", "nothing here", str(log)))
        note("doctor --log", (*PATCHKIT, "doctor", "--log", str(log)))
        note("doctor, all errors", (*PATCHKIT, "doctor", "--log", str(noisy)))
    show(f"A log of {log.stat().st_size / 1e6:.0f} MB", rows)


def measure_inspection(folder: Path, runs: int) -> None:
    """One table: a process that inspects a library of 346 MB, and one that hashes it."""
    wheels = tomllib.loads(WHEELS.read_text(encoding="utf-8"))["wheel"]
    stock = next(each for each in wheels if (each["project"], each["version"]) == NCCL)
    library = member(stock, "nvidia/nccl/lib/libnccl.so.2", folder)
    commands = {
        "floor: sha256 in Python": (sys.executable, "-c", HASH, str(library)),
        "inspect": (*PATCHKIT, "inspect", str(library)),
    }
    for tool in (each for each in wheels if each.get("machine") == platform.machine()):
        program = member(tool, "nvidia/cu13/bin/cuobjdump", folder)
        program.chmod(0o755)
        commands["cuobjdump -all"] = (str(program), "-all", str(library))
    rows: dict[str, list[float]] = {}
    note = recorder(rows)
    for _ in range(runs):
        for name, command in commands.items():
            note(name, command)
    show(f"NCCL {NCCL[1]}, {library.stat().st_size / 1e6:.0f} MB", rows)


def member(wheel: dict, name: str, folder: Path) -> Path:
    """A file of a wheel from the package index."""
    entry = LockEntry(
        **{key: wheel[key] for key in ("version", "filename", "sha256", "size")}
    )
    with zipfile.ZipFile(
        fetch(wheel["project"], entry.version, {entry.version: entry})
    ) as bundle:
        return Path(bundle.extract(name, folder))


def recorder(
    rows: dict[str, list[float]], codes: tuple[int, ...] = (0,)
) -> Callable[[str, tuple[str, ...]], None]:
    def note(name: str, command: tuple[str, ...]) -> None:
        rows.setdefault(name, []).append(timed(lambda: run(*command, codes=codes)))

    return note


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def run(*command: str, codes: tuple[int, ...] = (0,)) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode not in codes:
        raise subprocess.CalledProcessError(
            done.returncode, command, done.stdout, done.stderr
        )
    return done.stdout


def changed(tree: Path) -> list[Path]:
    """The Python files that an apply has edited."""
    originals = tree / ".patchkit" / "originals"
    return [tree / path.relative_to(originals) for path in originals.rglob("*.py")]


def parse(paths: list[Path]) -> None:
    for path in paths:
        libcst.parse_module(path.read_text())


def show(title: str, rows: dict[str, list[float]]) -> None:
    floor = statistics.median(
        next(rows[name] for name in rows if name.startswith("floor"))
    )
    table = Table(title=f"{title}, seconds", box=None, title_justify="left")
    for column in ("", "median", "min", "max", "ratio to the floor"):
        table.add_column(column, justify="left" if not column else "right")
    for name, values in rows.items():
        median = statistics.median(values)
        figures = (median, min(values), max(values))
        table.add_row(
            name, *(f"{figure:.3f}" for figure in figures), f"{median / floor:.2f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
