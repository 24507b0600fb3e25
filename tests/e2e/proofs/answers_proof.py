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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from patchkit.cluster.openai.model_answers import ModelAnswers, ask_model
from patchkit.doctor.answers import AnswerCase, answer_findings, fingerprint
from patchkit.finding import Finding, Level

TABLE = Path(__file__).parents[2] / "data" / "answers" / "proof.tsv"
PORT = 8137
URL = f"http://127.0.0.1:{PORT}"
START_SECONDS = 900
HEALTHY_RUNS = 4  # of each healthy start
# vLLM's own variables for a small machine; the development mode has the way to the worker.
VARIABLES = {
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
FORMATS = ("fp8", "fp4")
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
    "parser": ("--dtype", "bfloat16", "--enforce-eager", *PARSER, "mistral"),
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
    print(
        "\t".join(
            (row.kind, row.detail, row.first or "-", row.later or "-", row.figures)
        ),
        flush=True,
    )
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
            for seed in range(1 if kind in FORMATS else runs):
                post("/reset_prefix_cache")
                detail = json.loads(
                    post("/collective_rpc", method="damage", args=[kind, str(seed)])
                )["results"][0]
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
    rows = prove(model, given.work, given.runs, kinds)
    if given.write:
        TABLE.parent.mkdir(exist_ok=True)
        lines = [
            "\t".join(
                (row.kind, row.detail, row.first or "-", row.later or "-", row.figures)
            )
            for row in rows
        ]
        TABLE.write_text("\n".join(lines) + "\n")

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
