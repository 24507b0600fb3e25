"""Wrong answers: does patchkit see each kind, and leave healthy starts alone?

    nox -s answers-proof -- [--write] [--runs N] [--seconds N] [--model FOLDER] [KIND ...]

A small mixture of experts is trained here (tiny_model.py) and served by the real vLLM on CPU. Each
kind of fault is made N times in the running server (answer_faults.py), or by flags of the start;
then patchkit asks and judges as after `up`: by the answers alone ("at a first start"), and against
the fingerprint of the healthy start. Healthy starts with other dtypes, blocks and caches are judged
against the same fingerprint: the farthest of them says where the bounds may be. ``--model`` takes
the folder of real_model.py in the place of the trained model, and asks for numbers in long texts,
but for no call of a tool, which it never makes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from patchkit.cluster.openai import server_answers
from patchkit.cluster.openai.server_answers import ModelAnswers, ask_model
from patchkit.cluster.ssh.answer import encoded
from patchkit.doctor.answers import (
    AnswerCase,
    answer_findings,
    distances,
    fingerprint,
)
from patchkit.finding import Finding, Level
from patchkit.records import RECIPES, read_json
from tools.markdown import table

HEADER = (
    "what was wrong",
    "runs",
    "at a first start",
    "against a fingerprint",
    "as",
)
KINDS = {
    "scale": "the scale of one expert",
    "swap": "two experts swapped",
    "rope": "rotation of positions",
    "zero": "a layer that adds nothing",
    "noise": "experts in FP4 with the scales of other blocks",
    "nan": "a layer that computes no numbers",
    "stale": "a stale block behind a cached beginning",
    "template": "another model's chat template",
    "parser": "another model's parser of tool calls",
    "fp8": "nothing: experts in FP8",
    "fp4": "nothing: experts in NVFP4",
    "w4a4": "nothing: inputs of the experts in NVFP4",
    "healthy": "nothing: starts by dtype, block, cache, chunk, compiled",
}
TABLE = Path(__file__).parents[2] / "data" / "answers" / "proof.tsv"
PORT = 8137
START_SECONDS = 900
ASK_SECONDS = 600
HEALTHY_RUNS = 4  # of each healthy start
# vLLM's own variables for a small machine; the development mode has the way to the worker.
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "HF_HUB_OFFLINE": "1",
}
PARSER = ("--enable-auto-tool-choice", "--tool-call-parser")
GOOD_PARSER = (*PARSER, "hermes")
BASE = ("--dtype", "bfloat16", "--enforce-eager")
LIVE = ("scale", "swap", "rope", "zero", "noise", "stale", "nan")
# No faults: what another format of the weights does.
FORMATS = ("fp8", "fp4", "w4a4")
ONCE = (*FORMATS, "nan")  # nothing in them is drawn by lot
# Flags of a start that is wrong.
WRONG_TEMPLATE = ("--chat-template", "{folder}/wrong.jinja")
BY_FLAGS = {
    "template": (*BASE, *WRONG_TEMPLATE),
    "parser": (*BASE, *PARSER, "pythonic"),
}
HEALTHY = {
    "bfloat16, eager": BASE,
    "float32": ("--dtype", "float32", "--enforce-eager"),
    "float16": ("--dtype", "float16", "--enforce-eager"),
    "no prefix cache": (*BASE, "--no-enable-prefix-caching"),
    "blocks of 32": (*BASE, "--block-size", "32"),
    "blocks of 128": (*BASE, "--block-size", "128"),
    "chunks of 128": (*BASE, "--max-num-batched-tokens", "128", "--max-num-seqs", "16"),
    "FP8 KV cache": (*BASE, "--kv-cache-dtype", "fp8"),
    "compiled": ("--dtype", "bfloat16"),
}


@dataclass(frozen=True)
class Model:
    """A model, and the flags that each start of it has."""

    folder: Path
    flags: tuple[str, ...] = GOOD_PARSER

    @classmethod
    def real(cls, folder: Path) -> Model:
        """Return the model that real_model.py made: it knows the needles' long texts.

        It calls no tool, so that it has no parser, and the question is refused.
        """
        return cls(folder, ("--max-model-len", "8192"))


@contextlib.contextmanager
def served(
    model: Model,
    flags: tuple[str, ...],
    log: Path,
    port: int = PORT,
    variables: dict[str, str] = VARIABLES,
    seconds: float = START_SECONDS,
) -> Iterator[str]:
    """Serve a model until the block ends; yield the server's address.

    Raises RuntimeError with the end of the log if it does not serve within some seconds.
    """
    url = f"http://127.0.0.1:{port}"
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    words += [str(model.folder)]
    words += ["--served-model-name", "tiny", "--max-model-len", "2048"]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    words += ["--worker-extension-cls", "e2e.proofs.answer_faults.Faults"]
    words += model.flags
    words += [flag.format(folder=model.folder) for flag in flags]
    env = {**os.environ, **variables}
    with log.open("w") as file:
        server = subprocess.Popen(
            words, stdout=file, stderr=file, env=env, start_new_session=True
        )
    try:
        await_server(server, url, log, seconds)
        yield url
    finally:
        end(server)


def await_server(
    server: subprocess.Popen[bytes], url: str, log: Path, seconds: float
) -> None:
    deadline = time.monotonic() + seconds
    while not is_healthy(url):
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"vLLM does not serve: {log.read_text()[-3000:]}")
        time.sleep(0.5)


def end(server: subprocess.Popen[bytes]) -> None:
    """End a server, and the workers that outlive it."""
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def post(url: str, **body: object) -> str:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(answer.read().decode())


@dataclass(frozen=True)
class Row:
    """A judged run: what was accused at a first start, and against the healthy fingerprint.

    ``figures`` are distances between answers, and perplexities.
    """

    kind: str
    detail: str
    first: str
    later: str
    figures: str


def case_of(answers: ModelAnswers, healthy: ModelAnswers | None = None) -> AnswerCase:
    """Return answers to judge, against a healthy start or at a first start."""
    former = fingerprint(case_of(healthy), [], 0.0) if healthy else None
    return AnswerCase(answers=answers, former=former, again="", log=())


def with_flags(answers: ModelAnswers, flags: tuple[str, ...]) -> ModelAnswers:
    """Return answers that know the flags of their start, as those of `patchkit up` do."""
    parts = {**answers.start.parts, "flags": " ".join(flags)}
    return replace(answers, start=replace(answers.start, parts=parts))


def figures_of(case: AnswerCase, findings: list[Finding]) -> str:
    """Return the distances of answers, then their perplexities and facts if they have any."""
    gaps = [f"{name} {gap:.3f}" for name, gap in distances(case).items()]
    right = [one.what for one in findings if one.about == "answers-right"]
    return "; ".join((" ".join(gaps), *right))


def accused(findings: list[Finding]) -> str:
    bad = (Level.ERROR, Level.WARNING)
    return " ".join(
        f"{one.about.removeprefix('answers-')}:{one.level}"
        for one in findings
        if one.level in bad
    )


class Record:
    """The runs so far; several threads may ask at once.

    The folder has the answers of the healthy start (healthy.json) and of each run (kept.jsonl).
    ``flags`` are those of each start, by its name; runs with another name are of the start whose
    flags are ``base``. Questions of the kinds ``without`` are not judged.
    """

    def __init__(
        self,
        folder: Path,
        flags: dict[str, tuple[str, ...]],
        base: tuple[str, ...],
        without: list[str] | None = None,
    ) -> None:
        self.flags = flags
        self.base = base
        self.without = without or []
        self.healthy_file = folder / "healthy.json"
        self.kept_file = folder / "kept.jsonl"
        self.healthy: Future[ModelAnswers] = Future()
        self.rows: list[Row] = []
        self.lock = threading.Lock()

    def take_healthy(self, url: str) -> None:
        """Ask the start that the others are judged against, and begin the files anew."""
        ask_model(url, seconds=ASK_SECONDS)  # the first one is slow
        answers = ask_model(url, seconds=ASK_SECONDS)
        self.healthy_file.write_text(encoded(answers))
        self.kept_file.write_text("")
        self.healthy.set_result(answers)

    def ask_kind(self, url: str, kind: str, runs: int, name: str) -> None:
        """Ask a server some times; a fault of the running server is made anew each time."""
        for number in range(1 if kind in ONCE else runs):
            if kind in LIVE + FORMATS:
                self.ask_damaged(url, kind, str(number))
            else:
                self.ask(url, kind, f"{name} {number}")

    def ask_damaged(self, url: str, kind: str, seed: str) -> None:
        post(f"{url}/reset_prefix_cache")
        damage = f"{url}/collective_rpc"
        answer = json.loads(post(damage, method="damage", args=[kind, seed]))
        self.ask(url, kind, f"{seed} {answer['results'][0]}")
        post(damage, method="mend")

    def ask_mended(self, url: str, detail: str) -> None:
        """Ask a server whose faults were taken back."""
        post(f"{url}/reset_prefix_cache")
        self.ask(url, "healthy", detail)

    def ask(self, url: str, kind: str, detail: str) -> None:
        """Ask as `up` does, keep the answers, and judge them."""
        answers = ask_model(url, seconds=ASK_SECONDS)
        run = {"kind": kind, "detail": detail, "answers": encoded(answers)}
        with self.lock, self.kept_file.open("a") as file:
            file.write(f"{json.dumps(run)}\n")
        self.add(kind, detail, answers)

    def add(self, kind: str, detail: str, answers: ModelAnswers) -> None:
        """Judge answers at a first start, and against the healthy start."""
        replies = [
            reply for reply in answers.replies if reply.about not in self.without
        ]
        flags = self.flags.get(detail.rpartition(" ")[0], self.base)
        answers = with_flags(replace(answers, replies=tuple(replies)), flags)
        case = case_of(answers, with_flags(self.healthy.result(), self.base))

        first = answer_findings("here", case_of(answers))
        later = answer_findings("here", case)
        figures = figures_of(case, later)
        row = Row(kind, detail, accused(first), accused(later), figures)
        with self.lock:
            self.rows.append(row)
            print(line_of(row), flush=True)

    def judge_again(self) -> None:
        """Judge the answers that the files have."""
        healthy = read_json(ModelAnswers, self.healthy_file.read_text())
        self.healthy.set_result(healthy)
        for line in self.kept_file.read_text().splitlines():
            run = json.loads(line)
            answers = read_json(ModelAnswers, run["answers"])
            self.add(run["kind"], run["detail"], answers)


def prove(record: Record, model: Model, work: Path, runs: int, kinds: set[str]) -> None:
    with served(model, BASE, work / "base.log") as url:
        record.take_healthy(url)
        healthy_runs = HEALTHY_RUNS if "healthy" in kinds else 1
        record.ask_kind(url, "healthy", healthy_runs, "bfloat16, eager")
        for kind in sorted(kinds.intersection(LIVE + FORMATS)):
            record.ask_kind(url, kind, runs, "")
        record.ask_mended(url, "mended")

    others = {name: (name, flags) for name, flags in BY_FLAGS.items() if name in kinds}
    if "healthy" in kinds:
        others |= {name: ("healthy", flags) for name, flags in HEALTHY.items()}
        del others["bfloat16, eager"]
    for name, (kind, flags) in others.items():
        try:
            with served(model, flags, work / f"{name}.log") as url:
                healthy_runs = HEALTHY_RUNS if kind == "healthy" else runs
                record.ask_kind(url, kind, healthy_runs, name)
        except RuntimeError as error:
            print(f"{name}: not served here: {error}"[-400:], flush=True)


def write_rows(rows: list[Row], file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(f"{line_of(row)}\n" for row in rows))


def line_of(row: Row) -> str:
    return "\t".join(
        (row.kind, row.detail, row.first or "-", row.later or "-", row.figures)
    )


def table_of(rows: list[Row], words_of_kinds: dict[str, str]) -> str:
    """Return a table: how many runs of each kind, how many were accused, and of what."""
    return table(HEADER, table_rows(rows, words_of_kinds))


def table_rows(
    rows: list[Row], words_of_kinds: dict[str, str]
) -> Iterator[tuple[str, ...]]:
    for kind, words in words_of_kinds.items():
        runs = [row for row in rows if row.kind == kind]
        kinds: Counter[str] = Counter()
        for row in runs:
            kinds.update(sorted({part.partition(":")[0] for part in row.later.split()}))
        if runs:
            yield (
                words,
                str(len(runs)),
                count_levels([row.first for row in runs]),
                count_levels([row.later for row in runs]),
                ", ".join(f"{name} {count}" for name, count in kinds.most_common()),
            )


def count_levels(accusations: list[str]) -> str:
    """Return how many runs had an error, and how many of the others a warning."""
    errors = sum(str(Level.ERROR) in text for text in accusations)
    warnings = sum(bool(text) for text in accusations) - errors
    counts = {"error": errors, "warning": warnings}
    words = [f"{level} {count}" for level, count in counts.items() if count]
    return ", ".join(words) or "none"


def train(folder: Path, seconds: float) -> None:
    """Train the tiny model, unless the folder has it."""
    if not (folder / "config.json").exists():
        trainer = [sys.executable, "-m", "e2e.proofs.tiny_model"]
        subprocess.run([*trainer, folder, str(seconds)], check=True)


def leave_needles_out(work: Path) -> None:
    """Ask for no numbers in long texts: the tiny model finds none, and each takes seconds."""
    text = (RECIPES / "answers/questions.toml").read_text(encoding="utf-8")
    before, needles = text.split("# The numbers stand", 1)
    path = work / "questions.toml"
    path.write_text(before + needles[needles.index("[filler]") :], encoding="utf-8")
    server_answers._QUESTIONS = path


def write_wrong_template(model: Path) -> None:
    """Write the chat template that a wrong start takes."""
    wrong = "{%- for message in messages -%}[INST] {{ message['content'] }} [/INST]{%- endfor -%}"
    (model / "wrong.jinja").write_text(wrong)


def conclude(rows: list[Row]) -> None:
    """Tell who was accused though healthy, and what was missed.

    Exits with 1 if a healthy start had an error, or nothing was asked.
    """
    accused_rows = [
        row for row in rows if row.kind == "healthy" and (row.first + row.later)
    ]
    errors = [row for row in accused_rows if ":error" in row.first + row.later]
    no_faults = ("healthy", *FORMATS)
    missed = [
        row for row in rows if row.kind not in no_faults and not (row.first + row.later)
    ]
    print(f"{len(rows)} runs; an error though healthy: {named(errors)}")
    print(f"at least a warning though healthy: {named(accused_rows)}")
    print(f"missed: {named(missed)}")
    if errors or not rows:
        raise SystemExit(1)


def named(rows: list[Row]) -> str:
    return ", ".join(f"{row.kind} {row.detail}" for row in rows) or "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1500)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--model", type=Path)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)

    if given.model:
        model = Model.real(given.model)
    else:
        model = Model(given.work / "model")
        train(model.folder, given.seconds)
        leave_needles_out(given.work)
    write_wrong_template(model.folder)

    kinds = set(given.kinds) or {"healthy", *LIVE, *FORMATS, *BY_FLAGS}
    # Leave no server behind: they have sessions of their own.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    record = Record(given.work, {**BY_FLAGS, **HEALTHY}, BASE)
    prove(record, model, given.work, given.runs, kinds)
    if given.write:
        write_rows(record.rows, TABLE)
    print(table_of(record.rows, KINDS))
    conclude(record.rows)


if __name__ == "__main__":
    main()
