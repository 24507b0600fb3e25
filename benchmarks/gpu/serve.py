"""The OpenAI server of an installed vLLM, with tiny FP8 MoE models of random weights.

    python benchmarks/gpu/serve.py --work DIR [--attention TRITON_ATTN] [--graphs]

The vLLM to look at is the one that Python imports. For each model a real ``vllm serve`` is
started on the loopback, asked as a client would, and ended; then the same prompts go through the
``LLM`` class.
Logs and serve.json stay in DIR. Exit code 0: every check held. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from models import VOCABULARY, write_checkpoints
from server import QUIET, Server, end, family
from tokenizer import write_tokenizer

OFFLINE = Path(__file__).with_name("offline.py")
MODELS = ("moe-tensor", "moe-block")
NAME = "tiny"
PATIENCE = 400  # seconds until a server answers, and for the offline run
LENGTH = 256
PROMPTS = [
    ("The quick brown fox", 16),
    ("a", 24),
    ("Zwölf Boxkämpfer jagen Viktor " * 3, 8),
]
AT_ONCE = [("x" * (3 + 17 * number), 4 + 3 * number) for number in range(8)]
CHAT = [{"role": "user", "content": "Say something."}]
CHAT_TOKENS = 12
# Libraries that the engine must map, and from the installed package.
NEEDED = ("_C_stable_libtorch.abi3.so", "_moe_C_stable_libtorch.abi3.so")
SAID = {
    "attention": r"Using (?:AttentionBackendEnum\.)?([A-Z0-9_]+) (?:attention )?backend",
    "MoE": r"Using '?(\w+)'? Fp8 MoE backend",
    "linear": r"Selected (\w+) for Fp8LinearMethod",
    "patchkit": r"(patchkit: .*)",
}


@dataclass(slots=True)
class Outcome:
    """What one model showed; ``checks`` is name -> what was found wrong, or nothing."""

    checks: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    prompt_tokens: int = 0
    new_tokens: int = 0
    requests: int = 0

    def check(self, name: str, found: object, wanted: object) -> None:
        """Keep the first difference under a name."""
        wrong = "" if found == wanted else f"{found!r}, not {wanted!r}"[:300]
        self.checks[name] = self.checks.get(name) or wrong

    def count(self, usage: dict[str, int]) -> None:
        """Add one answer's tokens to what /metrics must show."""
        self.requests += 1
        self.prompt_tokens += usage["prompt_tokens"]
        self.new_tokens += usage["completion_tokens"]


def main() -> int:
    """Serve each model, print the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument(
        "--attention", help="attention backend; left to vLLM if not given"
    )
    parser.add_argument(
        "--graphs", action="store_true", help="compile, and capture CUDA graphs"
    )
    parser.add_argument(
        "--load-format", default="auto", help="dummy: weights of vLLM's own making"
    )
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "no CUDA device here\n")
    facts = installed()
    options.work.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, abandon)
    write_checkpoints(options.work / "models")
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = dict(
            zip(
                options.models,
                pool.map(lambda m: served(m, options), options.models),
                strict=True,
            )
        )
    report(facts, outcomes)
    result = {
        "installed": facts,
        "models": {name: asdict(o) for name, o in outcomes.items()},
    }
    (options.work / "serve.json").write_text(json.dumps(result, indent=1))
    return (
        1 if any(wrong for o in outcomes.values() for wrong in o.checks.values()) else 0
    )


def abandon(*_: object) -> None:
    """Leave nothing behind when asked to end: servers live in sessions of their own."""
    end(family(os.getpid())[1:], signal.SIGKILL)
    os._exit(128 + signal.SIGTERM)


def served(model: str, options: argparse.Namespace) -> Outcome:
    """One model; what stops it is a failed check."""
    outcome = Outcome()
    folder, log = options.work / "models" / model, options.work / f"{model}.log"
    tokenizer = write_tokenizer(folder, VOCABULARY)
    same = {
        "max_model_len": LENGTH,
        "max_num_seqs": 16,
        "seed": 0,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 256 << 20,
        "load_format": options.load_format,
        # A cached prefix is another shape of the same sum, and may round differently.
        "enable_prefix_caching": False,
        "enforce_eager": not options.graphs,
    } | ({"attention_backend": options.attention} if options.attention else {})
    try:
        with Server(
            [str(folder), "--served-model-name", NAME, *flags(same)], log, PATIENCE
        ) as up:
            outcome.facts["seconds until it answers"] = up.started
            start = time.monotonic()
            tokens = ask(up, tokenizer, outcome)
            outcome.facts["seconds of requests"] = round(time.monotonic() - start, 1)
        outcome.check("no process is left", up.survivors(), [])
        outcome.check(
            "tokens of LLM", offline(folder, same, log.with_suffix(".offline")), tokens
        )
    except Exception as error:  # noqa: BLE001 - the failure is the result
        outcome.checks["runs"] = f"{type(error).__name__}: {error}"
    outcome.facts["chosen"] = chosen(log)
    return outcome


def flags(arguments: dict[str, Any]) -> list[str]:
    """Arguments of ``LLM`` as options of ``vllm serve``."""
    found = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{option}" if value else f"--no-{option}")
        else:
            found += [f"--{option}", str(value)]
    return found


def ask(up: Server, tokenizer: Any, outcome: Outcome) -> list[list[int]]:
    """Every question; returns the greedy tokens of each prompt that was asked alone."""
    outcome.check("models", [m["id"] for m in up.ask("/v1/models")["data"]], [NAME])
    outcome.facts["version"] = up.ask("/version")["version"]
    known = importlib.metadata.version("vllm")
    outcome.check(
        "version", outcome.facts["version"].split("+")[0], known.split("+")[0]
    )
    alone = []
    for prompt, count in PROMPTS:
        first, again = (
            judged(complete(up, prompt, count), prompt, count, tokenizer, outcome)
            for _ in range(2)
        )
        outcome.check("same text twice", again["text"], first["text"])
        alone.append(first["token_ids"])
    with ThreadPoolExecutor(len(AT_ONCE)) as pool:
        together = list(pool.map(lambda asked: complete(up, *asked), AT_ONCE))
    same = 0
    for (prompt, count), answer in zip(AT_ONCE, together, strict=True):
        crowded = judged(answer, prompt, count, tokenizer, outcome)
        single = judged(complete(up, prompt, count), prompt, count, tokenizer, outcome)
        same += crowded["token_ids"] == single["token_ids"]
    # Not checked: other batches are other shapes, which round differently.
    outcome.facts["same tokens at once as alone"] = f"{same} of {len(AT_ONCE)}"
    chat(up, outcome)
    counters(up, outcome)
    libraries(up, outcome)
    return alone


def complete(up: Server, prompt: str, count: int) -> dict[str, Any]:
    """One greedy completion."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": count, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer: dict[str, Any] = up.ask("/v1/completions", body)
    return answer


def judged(
    answer: dict[str, Any], prompt: str, count: int, tokenizer: Any, outcome: Outcome
) -> dict[str, Any]:
    """The one choice of an answer, which must be of exactly ``count`` tokens."""
    choice, usage = answer["choices"][0], answer["usage"]
    outcome.count(usage)
    outcome.check("tokens as asked", usage["completion_tokens"], count)
    outcome.check("tokens as asked", len(choice["token_ids"]), count)
    outcome.check("ends by length", choice["finish_reason"], "length")
    known = tokenizer.encode(prompt, add_special_tokens=False).ids
    outcome.check("prompt as tokenised here", choice["prompt_token_ids"], known)
    return dict(choice)


def chat(up: Server, outcome: Outcome) -> None:
    """A chat, whole and as a stream, which must add up to the same."""
    body = {
        "model": NAME,
        "messages": CHAT,
        "max_tokens": CHAT_TOKENS,
        "temperature": 0,
    }
    body["ignore_eos"] = True
    whole = up.ask("/v1/chat/completions", body)
    outcome.count(whole["usage"])
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    events = list(up.events("/v1/chat/completions", asked))
    usage = [event["usage"] for event in events if event.get("usage")][-1]
    outcome.count(usage)
    parts = [
        choice["delta"].get("content") or "" for e in events for choice in e["choices"]
    ]
    outcome.check(
        "stream as whole", "".join(parts), whole["choices"][0]["message"]["content"]
    )
    outcome.check("stream in parts", sum(map(bool, parts)) > 1, True)
    outcome.check("tokens as asked", usage["completion_tokens"], CHAT_TOKENS)


def counters(up: Server, outcome: Outcome) -> None:
    """/metrics, which is brought up to date a moment after the answer."""
    wanted = {
        "vllm:prompt_tokens_total": outcome.prompt_tokens,
        "vllm:generation_tokens_total": outcome.new_tokens,
        "vllm:request_success_total": outcome.requests,
    }
    for _ in range(20):
        seen = up.metrics()
        found = {name: seen.get(name) for name in wanted}
        if found == wanted:
            break
        time.sleep(0.5)
    outcome.check("counters", found, wanted)
    outcome.facts["tokens"] = f"{outcome.prompt_tokens} in, {outcome.new_tokens} out"


def libraries(up: Server, outcome: Outcome) -> None:
    """The engine's process maps the installed package's libraries, and no other copy of them."""
    engines = up.engine_libraries()
    outcome.check("one engine", len(engines), 1)
    home = package()
    own = {*NEEDED, *(path.name for path in home.rglob("*.so"))}
    paths = [p for mapped in engines.values() for p in mapped if Path(p).name in own]
    outcome.facts["mapped"] = paths
    outcome.check(
        "libraries", sorted({Path(p).name for p in paths} & {*NEEDED}), sorted(NEEDED)
    )
    outcome.check(
        "libraries", [path for path in paths if home not in Path(path).parents], []
    )


def offline(model: Path, arguments: dict[str, Any], log: Path) -> list[list[int]]:
    """The tokens that the ``LLM`` class gives; RuntimeError with the end of its log."""
    out = log.with_suffix(".json")
    out.unlink(missing_ok=True)
    command = [sys.executable, str(OFFLINE), "--model", str(model), "--out", str(out)]
    command += ["--arguments", json.dumps(arguments), "--asked", json.dumps(PROMPTS)]
    environment = {**os.environ, **QUIET, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with log.open("w") as said:
        subprocess.run(
            command,
            env=environment,
            stdout=said,
            stderr=said,
            timeout=PATIENCE,
            check=False,
        )
    if not out.exists():
        raise RuntimeError(f"LLM: {log.read_text(errors='replace').strip()[-300:]}")
    tokens: list[list[int]] = json.loads(out.read_text())
    return tokens


def chosen(log: Path) -> dict[str, list[str]]:
    """What the server's log says of kernels, in the order in which it says it."""
    said = log.read_text(errors="replace") if log.exists() else ""
    return {
        kind: list(dict.fromkeys(re.findall(what, said))) for kind, what in SAID.items()
    }


def package() -> Path:
    """The folder of the vLLM that Python imports; vLLM itself is not loaded here."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise RuntimeError("vllm is not installed where this Python looks")
    return Path(found.origin).resolve().parent


def installed() -> dict[str, Any]:
    """Versions, places, and what patchkit wrote about the wheel."""
    names = ("vllm", "torch", "triton", "transformers")
    facts: dict[str, Any] = {name: importlib.metadata.version(name) for name in names}
    ledger = importlib.metadata.distribution("vllm").read_text("patchkit.json")
    facts["wheel"] = json.loads(ledger) if ledger else None
    facts |= {"python": sys.version.split()[0], "CUDA": torch.version.cuda}
    return facts | {"folder": str(package()), "device": torch.cuda.get_device_name()}


def report(facts: dict[str, Any], outcomes: dict[str, Outcome]) -> None:
    """The machine, a table of checks, and what was seen."""
    say(
        ", ".join(f"{name} {value}" for name, value in facts.items() if name != "wheel")
    )
    if wheel := facts["wheel"]:
        say(
            f"the wheel: {wheel.get('made', '')} {wheel.get('wheel', '')} {wheel.get('target', '')}"
        )
    names = dict.fromkeys(
        name for outcome in outcomes.values() for name in outcome.checks
    )
    say(f"\n| check | {' | '.join(outcomes)} |\n|---|{'---|' * len(outcomes)}")
    for name in names:
        cells = [state(outcome, name) for outcome in outcomes.values()]
        say(f"| {name} | {' | '.join(cells)} |")
    for model, outcome in outcomes.items():
        say(f"\n{model}")
        for name, value in outcome.facts.items():
            say(f"  {name}: {value}")
        for name, wrong in outcome.checks.items():
            if wrong:
                say(f"  FAILED {name}: {wrong}")
    failed = sum(
        bool(wrong)
        for outcome in outcomes.values()
        for wrong in outcome.checks.values()
    )
    say(f"\n{failed} checks failed" if failed else "\nevery check held")


def state(outcome: Outcome, name: str) -> str:
    """A check that was not reached did not hold."""
    return (
        "not reached"
        if name not in outcome.checks
        else "failed"
        if outcome.checks[name]
        else "held"
    )


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
