"""Wrong answers on GPUs: is each kind seen, and are healthy starts left alone?

    export PYTHONPATH=.:tests
    python -m e2e.proofs.answers_on_gpu train FOLDER [--texts FILE] [--seconds N]
    python -m e2e.proofs.answers_on_gpu prove FOLDER [--model MODEL] [--runs N] [--slots N]
        [--seconds N] [--first N] [--native SITE-PACKAGES]
    python -m e2e.proofs.answers_on_gpu judge FOLDER [--write] [--without KIND ...]

For a machine with one or more GPUs, vLLM and torch; CI has none and does not run it. Questions,
faults and judgement are those of answers_proof.py, which does the same on a CPU, one server after
the other. Here several servers share each GPU, and two ranks need two GPUs.

``train`` writes FOLDER/model: tiny_model's, trained on a GPU. Texts in four languages are those of
this machine, or FILE: what ``tiny_model.read_texts`` returned on another one, as JSON in xz.
``prove`` writes FOLDER/healthy.json and kept.jsonl (the answers), answers.tsv (a line for each run,
as in tests/data/answers/gpu.tsv) and a log for each server; it prints the table of docs/doctor.md,
and ends with 1 if a healthy start was accused. ``--model`` takes the folder of real_model.py in the
place of FOLDER/model. ``--first`` leaves out the starts between the first one and this one, for a
second part in another FOLDER. ``--native`` names a second installation, whose FlashAttention 2 has
machine code by `patchkit native --write`; the driver compiles that of the first one. ``judge``
judges kept answers again, for example with other bounds, on any machine; ``--write`` also writes
gpu.tsv and the page's table, ``--without`` leaves out questions. tests/data/answers/smollm2.tsv is
what it wrote of the real model without ``tool``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import lzma
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from e2e.proofs import answers_proof as proof
from patchkit.cluster.openai.server_answers import ask_model
from tools.markdown import replaced

PAGE = Path(__file__).parents[3] / "docs" / "doctor.md"
MAKER = "python -m e2e.proofs.answers_on_gpu"
DATA = proof.TABLE.with_name("gpu.tsv")
KINDS = {
    **proof.KINDS,
    "healthy": "nothing: starts by dtype, back end, FP8, block, cache, chunk, graphs, two ranks",
}
FIRST_PORT = 8200
EXAMPLES = 24_000
BATCH = 32
START_SECONDS = 300
HEALTHY_RUNS = 2  # of each healthy start
# Beside those of the CPU. Virtual machines may lack NVLink's multicast, which three of them turn
# off; the others name kernels that are compiled at the first start.
VARIABLES = {
    **proof.VARIABLES,
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
# Several servers fit onto a GPU.
LIMITS = (
    "--max-num-seqs",
    "32",
    "--gpu-memory-utilization",
    "0.1",
    "--kv-cache-memory-bytes",
    str(1 << 30),
)
EAGER = ("--enforce-eager",)
WHOLE = ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192")
EXPERTS = ("--moe-backend", "triton")
FLASH = ("--attention-backend", "FLASH_ATTN")
TRITON = ("--attention-backend", "TRITON_ATTN")
FLASHINFER = ("--attention-backend", "FLASHINFER")
BF16 = ("--dtype", "bfloat16")
FP16 = ("--dtype", "float16")
FP32 = ("--dtype", "float32")
GRAPHS = (*BF16, *FLASH)
BASE = (*GRAPHS, *EAGER)
FLASH2 = (*BASE, "--attention-config.flash_attn_version=2")


@dataclass(frozen=True)
class Start:
    """A start of vLLM: its flags, and what is asked while it serves.

    ``split`` is how ranks share the model: ``tensor`` or ``pipeline``. ``is_native`` says that it
    is the installation with assembled machine code.
    """

    name: str
    flags: tuple[str, ...]
    kinds: tuple[str, ...] = ("healthy",)
    ranks: int = 1
    split: str = "tensor"
    is_native: bool = False

    @property
    def is_damaged(self) -> bool:
        return any(kind in proof.LIVE + proof.FORMATS for kind in self.kinds)


# The first one answers what all others are judged against.
STARTS = (
    Start("bfloat16, eager", BASE, ("healthy", "scale", "swap")),
    Start("second", BASE, ("rope", "zero", "noise")),
    Start("third", BASE, ("stale", "nan", *proof.FORMATS)),
    Start("template", (*BASE, *proof.WRONG_TEMPLATE), ("template",)),
    Start("parser", (*BASE, *proof.PARSER, "pythonic"), ("parser",)),
    Start("float16, eager", (*FP16, *FLASH, *EAGER)),
    Start("bfloat16, Triton attention, eager", (*BF16, *TRITON, *EAGER)),
    Start("bfloat16, two ranks, eager", BASE, ranks=2),
    Start("bfloat16, graphs", GRAPHS),
    Start("float32, Triton attention, eager", (*FP32, *TRITON, *EAGER)),
    # FP8 has kernels of its own for experts.
    Start(
        "FP8 weights on the fly, eager",
        (*BASE, "--quantization", "fp8", "--moe-backend", "auto"),
    ),
    Start("float16, graphs", (*FP16, *FLASH)),
    Start("FP8 KV cache, eager", (*BASE, "--kv-cache-dtype", "fp8")),
    Start("bfloat16, Triton attention, graphs", (*BF16, *TRITON)),
    Start("float16, Triton attention, eager", (*FP16, *TRITON, *EAGER)),
    Start("no prefix cache, eager", (*BASE, "--no-enable-prefix-caching")),
    Start("blocks of 64, eager", (*BASE, "--block-size", "64")),
    Start("chunks of 128, eager", (*BASE, "--max-num-batched-tokens", "128")),
)
# The tiny model's heads are too small for FlashInfer.
MORE_STARTS = (
    Start("no chunks, eager", (*BASE, *WHOLE)),
    Start("bfloat16, FlashInfer, eager", (*BF16, *FLASHINFER, *EAGER)),
    # SmolLM2 has nine heads, which two ranks cannot share.
    Start("bfloat16, two stages, eager", BASE, ranks=2, split="pipeline"),
)
# The kernels are the same PTX: compiled by the driver, and assembled by patchkit.
NATIVE_STARTS = (
    Start("FlashAttention 2, native, eager", FLASH2, is_native=True),
    Start("FlashAttention 2, eager", FLASH2),
)


class Gpus:
    """The GPUs of this machine, each with room for some servers."""

    def __init__(self, names: list[str], slots: int) -> None:
        self.free = dict.fromkeys(names, slots)
        self.changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, ranks: int) -> Iterator[str]:
        """Wait for room on as many GPUs as there are ranks; yield their names."""
        with self.changed:
            self.changed.wait_for(lambda: sum(map(bool, self.free.values())) >= ranks)
            names = sorted(self.free, key=lambda name: -self.free[name])[:ranks]
            for name in names:
                self.free[name] -= 1
        try:
            yield ",".join(names)
        finally:
            with self.changed:
                for name in names:
                    self.free[name] += 1
                self.changed.notify_all()


def visible_gpus() -> list[str]:
    """Return the names of the GPUs that this process may use."""
    import torch  # `judge` needs none

    count = torch.cuda.device_count()
    if not count:
        raise SystemExit("torch sees no GPU: look at nvidia-smi, CUDA_VISIBLE_DEVICES")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:count] if visible else [str(n) for n in range(count)]


@dataclass(frozen=True)
class Servers:
    """What the threads share; none starts a server after ``deadline``, of the monotonic clock."""

    folder: Path
    model: proof.Model
    starts: tuple[Start, ...]
    record: proof.Record
    gpus: Gpus
    runs: int
    deadline: float
    native: Path | None

    def prove(self, number: int) -> None:
        """Start one of ``starts`` when a GPU has room, and ask it.

        Raises RuntimeError if it does not serve, TimeoutError if no time is left for it.
        """
        start = self.starts[number]
        try:
            with self.gpus.taken(start.ranks) as gpus, self.served(number, gpus) as url:
                self.ask(url, start)
        finally:
            if number == 0 and not self.record.healthy.done():
                error = RuntimeError("the first start gave no answers to judge against")
                self.record.healthy.set_exception(error)

    def served(self, number: int, gpus: str) -> contextlib.AbstractContextManager[str]:
        if time.monotonic() > self.deadline:
            raise TimeoutError("no time was left for it: give more with --seconds")
        start = self.starts[number]
        ranks = (f"--{start.split}-parallel-size", str(start.ranks))
        name = start.name.replace(", ", "-").replace(" ", "-")
        variables = {
            **VARIABLES,
            "CUDA_VISIBLE_DEVICES": gpus,
            "CUDA_CACHE_PATH": str(self.folder / "driver" / name),
        }
        if start.is_native:
            others = os.environ.get("PYTHONPATH", "")
            variables["PYTHONPATH"] = f"{self.native}{os.pathsep}{others}"
        return proof.served(
            self.model,
            (*start.flags, *LIMITS, *ranks),
            self.folder / f"{name}.log",
            port=FIRST_PORT + 10 * number,
            variables=variables,
            seconds=START_SECONDS,
        )

    def ask(self, url: str, start: Start) -> None:
        if start is self.starts[0]:
            self.record.take_healthy(url)
        else:
            ask_model(url, seconds=proof.ASK_SECONDS)  # the first one is slow
        self.record.healthy.result()

        for kind in start.kinds:
            runs = HEALTHY_RUNS if kind == "healthy" else self.runs
            self.record.ask_kind(url, kind, runs, start.name)
        if start.is_damaged:
            self.record.ask_mended(url, f"mended {start.name}")


def prove(given: argparse.Namespace) -> proof.Record:
    """Ask all starts, several at once; tell which of them did not serve."""
    model, starts = choose_model(given)
    starts = (starts[0], *starts[given.first :])
    proof.write_wrong_template(model.folder)
    # Leave no server behind: they have sessions of their own.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    record = make_record(given.folder)
    names = visible_gpus()
    deadline = time.monotonic() + given.seconds
    gpus = Gpus(names, given.slots)
    servers = Servers(
        folder=given.folder,
        model=model,
        starts=starts,
        record=record,
        gpus=gpus,
        runs=given.runs,
        deadline=deadline,
        native=given.native,
    )
    runs: dict[str, Future[None]] = {}
    with ThreadPoolExecutor(len(names) * given.slots) as pool:
        try:
            for number, start in enumerate(starts):
                if start.ranks > len(names):
                    print(f"{start.name}: needs {start.ranks} GPUs, left out")
                else:
                    runs[start.name] = pool.submit(servers.prove, number)
            wait(runs.values())
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise

    for name, run in runs.items():
        if error := run.exception():
            print(f"{name}: {type(error).__name__}: {str(error)[-300:]}")
    return record


def make_record(folder: Path, without: list[str] | None = None) -> proof.Record:
    starts = (*STARTS, *MORE_STARTS, *NATIVE_STARTS)
    flags = {start.name: start.flags for start in starts}
    return proof.Record(folder, flags, STARTS[0].flags, without)


def choose_model(given: argparse.Namespace) -> tuple[proof.Model, tuple[Start, ...]]:
    """Return the model to serve, and its starts; the trained one is asked for no needles."""
    if given.model:
        # It calls no tool: no parser of calls is wrong.
        one_rank = [
            start
            for start in STARTS
            if start.ranks == 1 and "parser" not in start.kinds
        ]
        starts = (*one_rank, *MORE_STARTS)
        if given.native:
            # The driver compiles for minutes: these begin first.
            starts = (*starts[: given.first], *NATIVE_STARTS, *starts[given.first :])
        return proof.Model.real(given.model.resolve()), starts

    folder = given.folder / "model"
    if not (folder / "config.json").exists():
        raise SystemExit(f"{given.folder} has no model: {MAKER} train {given.folder}")
    proof.leave_needles_out(given.folder)
    return proof.Model(folder, (*EXPERTS, *proof.GOOD_PARSER)), STARTS


def judge(given: argparse.Namespace) -> proof.Record:
    """Judge answers that were kept, with the bounds of this checkout."""
    record = make_record(given.folder, given.without)
    record.judge_again()
    if given.write:
        proof.write_rows(record.rows, DATA)
        made = proof.table_of(record.rows, KINDS).strip()
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(replaced(page, "answers", MAKER, made), encoding="utf-8")
    return record


def train(given: argparse.Namespace) -> None:
    """Train tiny_model's model on the first GPU."""
    import torch

    from e2e.proofs import tiny_model

    if given.texts:
        texts = json.loads(lzma.decompress(given.texts.read_bytes()))
    else:
        texts = tiny_model.read_texts()
    lessons = tiny_model.make_lessons(texts)
    # A GPU computes a step faster than a processor draws its examples.
    examples = [lessons.example() for _ in range(EXAMPLES)]
    rows = torch.tensor(examples, device="cuda")

    def draw() -> torch.Tensor:
        return rows[torch.randint(len(rows), (BATCH,), device="cuda")]

    torch.backends.cuda.matmul.allow_tf32 = True
    model = given.folder / "model"
    tiny_model.fit(lessons.tokenizer, draw, model, given.seconds, "cuda")


def conclude(record: proof.Record, folder: Path) -> None:
    """Write a line for each run, print the table, and exit with 1 if a healthy start is accused."""
    proof.write_rows(record.rows, folder / "answers.tsv")
    print(proof.table_of(record.rows, KINDS))
    proof.conclude(record.rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, seconds in (("train", 60.0), ("prove", 280.0), ("judge", 0.0)):
        command = verbs.add_parser(verb)
        command.add_argument("folder", type=Path)
        command.add_argument("--seconds", type=float, default=seconds)
        if verb == "train":
            command.add_argument("--texts", type=Path)
        elif verb == "prove":
            command.add_argument("--runs", type=int, default=5)
            command.add_argument("--slots", type=int, default=4)
            command.add_argument("--model", type=Path)
            command.add_argument("--first", type=int, default=1)
            command.add_argument("--native", type=Path)
        else:
            command.add_argument("--write", action="store_true")
            command.add_argument("--without", nargs="*")
    given = parser.parse_args()
    given.folder = given.folder.resolve()

    if given.verb == "train":
        train(given)
    else:
        record = prove(given) if given.verb == "prove" else judge(given)
        conclude(record, given.folder)


if __name__ == "__main__":
    main()
