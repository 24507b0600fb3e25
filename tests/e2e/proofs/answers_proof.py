"""Wrong answers: does patchkit see each kind, and leave healthy starts alone?

    nox -s answers-proof -- [--write] [--runs N] [--seconds N] [KIND ...]

A small mixture of experts is trained here (tiny_model.py) and served by the real vLLM on CPU. Each
kind of fault is made N times in the running server (answer_faults.py), or by flags of the start;
then patchkit asks and judges as after `up`: by the answers alone ("at a first start"), and against
the fingerprint of the healthy start. Healthy starts with other dtypes, blocks and caches are judged
against the same fingerprint: the farthest of them says where the bounds may be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from e2e.proofs.tiny_model import QUESTIONS
from patchkit.cluster.openai import model_answers
from patchkit.cluster.openai.model_answers import ModelAnswers, ask_model
from patchkit.doctor.answers import AnswerCase, answer_findings, fingerprint
from patchkit.finding import Finding, Level
from tools.markdown import table

HEADER = (
    "what was wrong",
    "runs",
    "found at a first start",
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
    "healthy": "nothing: nine starts by dtype, block, cache, chunk, compiled",
}
TABLE = Path(__file__).parents[2] / "data" / "answers" / "proof.tsv"
PORT = 8137
URL = f"http://127.0.0.1:{PORT}"
START_SECONDS = 900
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
BASE = ("--dtype", "bfloat16", "--enforce-eager", *GOOD_PARSER)
LIVE = ("scale", "swap", "rope", "zero", "noise", "stale", "nan")
# No faults: what another format of the weights does.
FORMATS = ("fp8", "fp4", "w4a4")
ONCE = (*FORMATS, "nan")  # nothing in them is drawn by lot
# Flags of a start that is wrong.
BY_FLAGS = {
    "template": (
        "--dtype",
        "bfloat16",
        "--enforce-eager",
        *GOOD_PARSER,
        "--chat-template",
        "{folder}/wrong.jinja",
    ),
    "parser": ("--dtype", "bfloat16", "--enforce-eager", *PARSER, "pythonic"),
}
HEALTHY = {
    "bfloat16, eager": BASE,
    "float32": ("--dtype", "float32", "--enforce-eager", *GOOD_PARSER),
    "float16": ("--dtype", "float16", "--enforce-eager", *GOOD_PARSER),
    "no prefix cache": (*BASE, "--no-enable-prefix-caching"),
    "blocks of 32": (*BASE, "--block-size", "32"),
    "blocks of 128": (*BASE, "--block-size", "128"),
    "chunks of 128": (*BASE, "--max-num-batched-tokens", "128", "--max-num-seqs", "16"),
    "FP8 KV cache": (*BASE, "--kv-cache-dtype", "fp8"),
    "compiled": ("--dtype", "bfloat16", *GOOD_PARSER),
}


@contextlib.contextmanager
def served(model: Path, flags: tuple[str, ...], log: Path) -> Iterator[None]:
    """Serve a model until the block ends."""
    words = [
        Path(sys.executable).with_name("vllm"),
        "serve",
        model,
        "--served-model-name",
        "tiny",
    ]
    words += ["--host", "127.0.0.1", "--port", str(PORT), "--max-model-len", "2048"]
    words += ["--worker-extension-cls", "e2e.proofs.answer_faults.Faults"]
    words += [flag.format(folder=model) for flag in flags]
    env = {**os.environ, **VARIABLES}
    with (
        log.open("w") as file,
        subprocess.Popen(words, stdout=file, stderr=file, env=env) as server,
    ):
        try:
            deadline = time.monotonic() + START_SECONDS
            while not is_healthy():
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"vLLM does not serve: {log.read_text()[-3000:]}"
                    )
                time.sleep(1)
            yield
        finally:
            server.terminate()


def is_healthy() -> bool:
    try:
        with urllib.request.urlopen(f"{URL}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def post(path: str, **body: object) -> str:
    data = json.dumps(body).encode()
    request = urllib.request.Request(
        URL + path, data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(answer.read().decode())


@dataclass(frozen=True)
class Row:
    """A judged run: what was accused at a first start, and against the healthy fingerprint."""

    kind: str
    detail: str
    first: str
    later: str
    figures: str


def judge(answers: ModelAnswers, healthy: ModelAnswers | None) -> list[Finding]:
    """Return the findings against a healthy start, or at a first start."""
    former = None
    if healthy:
        former = fingerprint(case_of(healthy), [], 0.0)
        start = replace(former.start, parts={**former.start.parts, "flags": "others"})
        former = replace(former, start=start)
    case = AnswerCase(answers=answers, former=former, again="", log=())
    return answer_findings("here", case)


def case_of(answers: ModelAnswers) -> AnswerCase:
    return AnswerCase(answers=answers, former=None, again="", log=())


def accused(findings: list[Finding]) -> str:
    bad = (Level.ERROR, Level.WARNING)
    return " ".join(
        f"{one.about.removeprefix('answers-')}:{one.level}"
        for one in findings
        if one.level in bad
    )


def ask_and_judge(kind: str, detail: str, healthy: ModelAnswers, kept: Path) -> Row:
    """Ask the running server as `up` does, and judge its answers both ways."""
    answers = ask_model(URL, seconds=600)
    name = f"{kind} {detail}".replace("/", "-").replace(" ", "-")[:80]
    (kept / f"{name}.json").write_text(encoded(answers))
    figures = "; ".join(one.what for one in judge(answers, healthy))
    row = Row(
        kind,
        detail,
        accused(judge(answers, None)),
        accused(judge(answers, healthy)),
        figures,
    )
    print(line_of(row), flush=True)
    return row


def encoded(answers: ModelAnswers) -> str:
    from patchkit.cluster.ssh.answer import encoded as text

    return text(answers)


def prove(model: Path, work: Path, runs: int, kinds: set[str]) -> list[Row]:
    rows = []
    with served(model, BASE, work / "base.log"):
        ask_model(URL, seconds=600)  # the first one is slow
        healthy = ask_model(URL, seconds=600)
        (work / "healthy.json").write_text(encoded(healthy))
        for number in range(HEALTHY_RUNS if "healthy" in kinds else 1):
            detail = f"bfloat16, eager {number}"
            rows += [ask_and_judge("healthy", detail, healthy, work)]
        for kind in sorted(kinds.intersection(LIVE + FORMATS)):
            for seed in range(1 if kind in ONCE else runs):
                post("/reset_prefix_cache")
                detail = json.loads(
                    post("/collective_rpc", method="damage", args=[kind, str(seed)])
                )["results"][0]
                detail = f"{seed} {detail}"
                rows.append(ask_and_judge(kind, detail, healthy, work))
                post("/collective_rpc", method="mend")
        post("/reset_prefix_cache")
        rows.append(ask_and_judge("healthy", "mended", healthy, work))

    others = {name: (name, flags) for name, flags in BY_FLAGS.items() if name in kinds}
    if "healthy" in kinds:
        others |= {name: ("healthy", flags) for name, flags in HEALTHY.items()}
        del others["bfloat16, eager"]
    for name, (kind, flags) in others.items():
        try:
            with served(model, flags, work / f"{name}.log"):
                for run in range(HEALTHY_RUNS if kind == "healthy" else runs):
                    detail = f"{name} {run}"
                    rows.append(ask_and_judge(kind, detail, healthy, work))
        except RuntimeError as error:
            print(f"{name}: not served here: {error}"[-400:], flush=True)
    return rows


def write_down(rows: list[Row]) -> None:
    """Write the runs as a file of data, and print their table."""
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("".join(f"{line_of(row)}\n" for row in rows))
    print(table(HEADER, table_rows(rows)))


def line_of(row: Row) -> str:
    return "\t".join(
        (row.kind, row.detail, row.first or "-", row.later or "-", row.figures)
    )


def table_rows(rows: list[Row]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each kind: how many runs, how many were accused, and of what."""
    for kind, words in KINDS.items():
        runs = [row for row in rows if row.kind == kind]
        kinds: Counter[str] = Counter()
        for row in runs:
            kinds.update({part.partition(":")[0] for part in row.later.split()})
        if runs:
            yield (
                words,
                str(len(runs)),
                str(sum(bool(row.first) for row in runs)),
                str(sum(bool(row.later) for row in runs)),
                ", ".join(f"{name} {count}" for name, count in kinds.most_common()),
            )


def leave_needles_out(work: Path) -> None:
    """Ask for no numbers in long texts: the tiny model finds none, and each takes seconds."""
    text = QUESTIONS.read_text(encoding="utf-8")
    before, needles = text.split("# The numbers stand", 1)
    path = work / "questions.toml"
    path.write_text(before + needles[needles.index("[filler]") :], encoding="utf-8")
    model_answers._QUESTIONS = path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1500)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)

    model = given.work / "model"
    if not (model / "config.json").exists():
        subprocess.run(
            [sys.executable, "-m", "e2e.proofs.tiny_model", model, str(given.seconds)],
            check=True,
        )
    wrong = "{%- for message in messages -%}[INST] {{ message['content'] }} [/INST]{%- endfor -%}"
    (model / "wrong.jinja").write_text(wrong)

    kinds = set(given.kinds) or {"healthy", *LIVE, *FORMATS, *BY_FLAGS}
    leave_needles_out(given.work)
    rows = prove(model, given.work, given.runs, kinds)
    if given.write:
        write_down(rows)

    accused_healthy = [
        row
        for row in rows
        if row.kind == "healthy" and "error" in row.first + row.later
    ]
    missed = [
        row
        for row in rows
        if row.kind not in ("healthy", *FORMATS) and not (row.first + row.later)
    ]
    print(f"{len(rows)} runs; accused though healthy: {len(accused_healthy)}")
    print(
        f"missed: {', '.join(f'{row.kind} {row.detail}' for row in missed) or 'none'}"
    )
    if accused_healthy:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
