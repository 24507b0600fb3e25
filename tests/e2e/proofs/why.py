"""Slow servers: does `patchkit bench --why` name the right part, and none in a healthy server?

    nox -s why-proof -- FOLDER [--seconds N] [--limit N] [GROUP ...]

Real servers of vLLM with random weights, in the shape of a 14B model in BF16; each fault is made by
flags, variables, a load, or a program on the engine's core. The groups run side by side, one for a
GPU; the groups of two ranks follow. A row of FOLDER/why.jsonl is one run; runs that have a row are
not made again. Without a GPU, stand-ins are served, and only the faults are made that a CPU has.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
STAND_IN = ROOT / "tests" / "support" / "decoding_server.py"
START_SECONDS = 150
RUN_SECONDS = 90
PORT = 8350
SIZES = "1 2 4 8 16 32"
# NVLink multicast stays off. Caches are shared, so that only the first start compiles.
VARIABLES = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LAYER = 5120 * (2 * 5120 + 2 * 1024 + 3 * 17408)  # attention, keys and values, MLP
WEIGHTS = 2 * (40 * LAYER + 32000 * 5120)  # bytes
GRAPHS = ("--cudagraph-capture-sizes", *SIZES.split())
# On Hopper, vLLM would reduce in FlashInfer's kernels; on a GB10, in NCCL's.
NO_FUSION = '{"pass_config": {"fuse_allreduce_rms": false}}'
TWO = (
    "--tensor-parallel-size",
    "2",
    "--disable-custom-all-reduce",
    "--compilation-config",
    NO_FUSION,
    *GRAPHS,
)


@dataclass(frozen=True)
class Case:
    """A fault, the id that `--why` has to give it, and the load under which it shows."""

    fault: str
    expected: str
    requests: int = 4
    hog: bool = False
    runs: int = 3


@dataclass(frozen=True)
class Group:
    """Faults that one start of a server has."""

    name: str
    cases: tuple[Case, ...]
    flags: tuple[str, ...] = GRAPHS
    variables: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    on_cpu: bool = False


HEALTHY = Case("none", "none")
GROUPS = (
    Group("healthy", (HEALTHY, Case("CPU hog", "cpu", hog=True)), on_cpu=True),
    Group("eager", (Case("eager", "eager"),), ("--enforce-eager",), on_cpu=True),
    Group(
        "graphs",
        (
            Case("graph too small", "graphs", 12, runs=2),
            Case("graph too large", "graphs", 1, runs=2),
        ),
        ("--cudagraph-capture-sizes", "8"),
    ),
    Group(
        "two seats",
        (Case("drafter off", "drafter", 2), Case("lowered batch", "batch", 8)),
        (*GRAPHS[:3], "--max-num-seqs", "2"),
        config={"num_nextn_predict_layers": 1},
        on_cpu=True,
    ),
    Group(
        "back end",
        (Case("other back end", "back-end"),),
        (*GRAPHS, "--attention-backend", "TRITON_ATTN"),
        on_cpu=True,
    ),
    Group("two ranks", (HEALTHY,), TWO, ranks=2),
    Group("sockets", (Case("sockets", "sockets"),), TWO, SOCKETS, ranks=2),
)


@dataclass
class Lane:
    """The folder of the results, and the limits of one proof.

    ``path`` goes before PYTHONPATH for patchkit alone, on a machine that lacks its libraries.
    """

    folder: Path
    seconds: int
    end: float
    gpus: int
    path: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of all runs until now."""
        path = self.folder / "why.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def keep(self, **row: Any) -> None:
        """Add a row, at once."""
        with self.lock, (self.folder / "why.jsonl").open("a") as file:
            file.write(f"{json.dumps(row)}\n")
        shown = {name: row.get(name) for name in ("group", "fault", "named", "step_ms")}
        print(json.dumps(shown), flush=True)

    def has_time(self, seconds: float) -> bool:
        """Return whether so many seconds are left."""
        return time.monotonic() + seconds < self.end


def model_folder(lane: Lane, group: Group) -> Path:
    """Return the folder of a group's model."""
    return lane.folder / "models" / group.name.replace(" ", "-")


def write_model(folder: Path, more: dict[str, Any], is_real: bool) -> None:
    """Write a model without weights, with a tokenizer that knows a word for each token."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **more}
    (folder / "config.json").write_text(json.dumps(config))
    # A checkpoint for those who read no more than its header.
    weights = {"lm_head.weight": {"dtype": "BF16", "data_offsets": [0, WEIGHTS]}}
    header = json.dumps(weights).encode()
    length = len(header).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(length + header)
    if is_real:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = {f"t{number}": number for number in range(config["vocab_size"])}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="t2"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="t0", eos_token="t1", unk_token="t2"
        )
        fast.save_pretrained(folder)


def server_words(lane: Lane, group: Group, model: Path, port: int) -> list[str]:
    """Return the words that start a server of a group."""
    if not lane.gpus:
        return [sys.executable, str(STAND_IN), str(port), str(model), *group.flags]
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", str(model), "--load-format", "dummy", "--port", str(port)]
    words += ["--host", "127.0.0.1", "--max-model-len", "4096", "--dtype", "bfloat16"]
    words += ["--gpu-memory-utilization", "0.4", "--no-enable-prefix-caching"]
    return [*words, *group.flags]


@contextlib.contextmanager
def served(lane: Lane, group: Group, slot: int) -> Iterator[tuple[str, Path]]:
    """Serve the model of a group on the GPU ``slot``, or on all; yield its URL and its log."""
    port = PORT + 10 * slot + GROUPS.index(group)
    model = model_folder(lane, group)
    devices = range(group.ranks) if group.ranks > 1 else [slot]
    env = {**os.environ, **VARIABLES, **group.variables}
    env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    log = lane.folder / f"{group.name.replace(' ', '-')}.log"
    words = [*pinned(slot, group.ranks), *server_words(lane, group, model, port)]
    url = f"http://127.0.0.1:{port}"

    with log.open("wb") as file:
        server = subprocess.Popen(
            words, stdout=file, stderr=file, env=env, start_new_session=True
        )
    try:
        await_server(server, url, log)
        yield url, log
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def pinned(slot: int, ranks: int) -> list[str]:
    """Return the words that give a server twelve cores, or 24 for two ranks."""
    if (os.cpu_count() or 1) < 24 or not shutil.which("taskset"):
        return []
    cores = "0-23" if ranks > 1 else f"{12 * slot}-{12 * slot + 11}"
    return ["taskset", "-c", cores]


def await_server(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until the server answers. Raises RuntimeError if it ends or takes too long."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/v1/models"):
            return
        time.sleep(0.5)
    raise RuntimeError(f"no server: {log.read_text(errors='replace')[-1500:]}")


@contextlib.contextmanager
def hogged(url: str) -> Iterator[None]:
    """Let the engine share a core with four programs that compute without end."""
    from patchkit.doctor.step_server import find_server_process

    engines = find_server_process(url).engines
    core = max(os.sched_getaffinity(int(next(iter(engines)))))
    former: dict[int, set[int]] = {}
    for pid in engines:
        for folder in Path(f"/proc/{pid}/task").glob("*"):
            thread = int(folder.name)
            former[thread] = os.sched_getaffinity(thread)
            os.sched_setaffinity(thread, {core})

    words = [sys.executable, "-c", "while True: pass"]
    hogs = [subprocess.Popen(words) for _ in range(4)]
    for hog in hogs:
        os.sched_setaffinity(hog.pid, {core})
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
        for thread, cores in former.items():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, cores)


def run_case(lane: Lane, group: Group, case: Case, place: tuple[str, Path]) -> None:
    """Ask `bench --why` about a case once, and keep the row."""
    url, log = place
    words = [sys.executable, "-m", "patchkit", "bench", "--why", "toy", "--json"]
    words += ["--url", url, "--log", str(log), "--seconds", str(lane.seconds)]
    words += ["--concurrency", str(case.requests)]
    words += ["-o", str(lane.folder / "records" / str(time.time_ns()))]
    began = time.monotonic()
    paths = [lane.path, os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, **VARIABLES, "PYTHONPATH": ":".join(filter(None, paths))}
    done = subprocess.run(
        words, capture_output=True, text=True, env=env, timeout=RUN_SECONDS
    )
    row: dict[str, Any] = {
        "group": group.name,
        "fault": case.fault,
        "expected": case.expected,
        "seconds": round(time.monotonic() - began, 1),
    }
    try:
        step = json.loads(done.stdout)["step"]
    except (ValueError, KeyError):
        lane.keep(**row, named=None, error=(done.stdout + done.stderr)[-1500:])
        return
    lane.keep(
        **row,
        named=step["fault"]["id"],
        verdict=step["fault"]["what"],
        step_ms=step["measured"]["step_ms"],
        rest_ms=step["parts"][-1]["ms"],
        parts={part["name"]: part["ms"] for part in step["parts"]},
        sources={part["name"]: part["source"] for part in step["parts"]},
        measured=step["measured"],
    )


def run_group(lane: Lane, group: Group, slot: int) -> None:
    """Make the runs of a group that have no row yet."""
    done = [
        (row["group"], row["fault"]) for row in lane.rows if row["named"] is not None
    ]
    left = [
        case
        for case in group.cases
        for _ in range(case.runs - done.count((group.name, case.fault)))
    ]
    if not left or not lane.has_time(60):
        return
    try:
        with served(lane, group, slot) as place:
            for case in left:
                if not lane.has_time(25):
                    return
                with hogged(place[0]) if case.hog else contextlib.nullcontext():
                    run_case(lane, group, case, place)
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        lane.keep(group=group.name, fault="?", named=None, error=str(error)[-3000:])


def run_slot(lane: Lane, waiting: list[Group], slot: int) -> None:
    """Take groups until none is left."""
    while True:
        with lane.lock:
            if not waiting:
                return
            group = waiting.pop(0)
        run_group(lane, group, slot)


def summarize(rows: Sequence[dict[str, Any]]) -> str:
    """Return how many runs were named right, and how far the sums are from the steps."""
    runs = [row for row in rows if row["named"] is not None]
    wanted = [row for row in runs if row["expected"] != "none"]
    right = [row for row in wanted if row["named"] == row["expected"]]
    healthy = [row for row in runs if row["expected"] == "none"]
    accused = [row for row in healthy if row["named"] not in ("none", "unknown")]
    gaps = [abs(row["rest_ms"]) / row["step_ms"] for row in runs]
    near = [gap for gap in gaps if gap <= 0.1]
    return (
        f"right: {len(right)} of {len(wanted)}; healthy accused: {len(accused)} of "
        f"{len(healthy)}; sum within 10 %: {len(near)} of {len(gaps)}"
    )


def count_gpus() -> int:
    """Return the number of GPUs that nvidia-smi lists."""
    if not shutil.which("nvidia-smi"):
        return 0
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return done.stdout.count("GPU ") if done.returncode == 0 else 0


def main() -> None:
    """Run the groups that the arguments name, all by default."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--limit", type=int, default=540)
    parser.add_argument("--path", default="")
    parser.add_argument("groups", nargs="*")
    given = parser.parse_intermixed_args()

    given.folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + given.limit
    lane = Lane(given.folder, given.seconds, end, count_gpus(), given.path)
    chosen = [
        group
        for group in GROUPS
        if (not given.groups or group.name in given.groups)
        and (lane.gpus >= group.ranks or group.on_cpu)
    ]

    # Before the threads: transformers fails if two of them import it at once.
    for group in chosen:
        write_model(model_folder(lane, group), group.config, lane.gpus > 0)

    alone = [group for group in chosen if group.ranks == 1]
    slots = min(max(lane.gpus, 1), 2)
    with ThreadPoolExecutor(slots) as pool:
        list(pool.map(lambda slot: run_slot(lane, alone, slot), range(slots)))
    for group in chosen:
        if group.ranks > 1:
            run_group(lane, group, 0)
    print(summarize(lane.rows), flush=True)


if __name__ == "__main__":
    main()
