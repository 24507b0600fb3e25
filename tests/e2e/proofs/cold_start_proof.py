"""On a GPU: how long vLLM needs from empty caches to its first token, by what is compiled before.

    python tests/e2e/proofs/cold_start_proof.py FOLDER WAY... [-- ARGUMENTS OF VLLM]

Each WAY is NAME=PYTHONPATH, as `stock=/tmp/site native=/tmp/native:/tmp/site`: the folders that the
interpreter gets, which also runs this file and has the release's torch. A small model of random
weights is served in new folders with empty caches, and asked for a sampled answer. FOLDER gets
results.jsonl, a line for each start: the seconds, the compilers that ran meanwhile, the tokens; and
the sampler's answers, which are compared bit by bit. Exit code 5 where ways differ in them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

_SETTINGS = Path(__file__).with_name("cold_start.toml")
_COMPILERS = ("nvcc", "cicc", "ninja", "cudafe++")
_PORT = 8123
_LIMIT = 420.0  # seconds of a start

# The sampler alone, on fixed logits: what FlashInfer answers with a seed, as a digest. Functions
# that renormalise are left out: they answer a second call in one process with other bits.
_SAMPLER = """
import hashlib, json, torch, flashinfer
from flashinfer import sampling
generator = torch.Generator("cuda").manual_seed(7)
digest = hashlib.sha256()
for rows, size in ((1, 1024), (7, 32000), (64, 151936)):
    logits = torch.randn(rows, size, generator=generator, device="cuda") * 4
    for top_k, top_p in ((50, 0.9), (1, 1.0), (size, 0.5)):
        answers = [
            sampling.softmax(logits),
            sampling.top_k_top_p_sampling_from_logits(
                logits, top_k, top_p,
                generator=torch.Generator("cuda").manual_seed(11)),
            sampling.top_k_mask_logits(logits, top_k),
        ]
        for answer in answers:
            digest.update(answer.cpu().numpy().tobytes())
print(json.dumps({"sampler": digest.hexdigest()}))
"""


def main() -> int:
    words = sys.argv[1:]
    extra = words[words.index("--") + 1 :] if "--" in words else []
    if "--" in words:
        words = words[: words.index("--")]
    folder, *ways = words

    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    model = root / "model"
    write_model(model)

    samplers: dict[str, str] = {}
    for number, way in enumerate(ways):
        name, _, path = way.partition("=")
        caches = root / f"caches-{number}-{name}"
        result = cold_start(caches, model, path, extra)
        if name not in samplers:
            samplers[name] = ask_sampler(caches, path)
        shutil.rmtree(caches, ignore_errors=True)

        line = {"way": name, **result, "sampler": samplers[name]}
        with (root / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
    return 5 if len(set(samplers.values())) > 1 else 0


def write_model(folder: Path) -> None:
    """Write the model of `patchkit proof`: a config, and a tokenizer whose words are tokens."""
    files = tomllib.loads(_SETTINGS.read_text("utf-8"))["serve"]["files"]
    size = files["config"]["vocab_size"]
    files["tokenizer"]["model"]["vocab"] = {f"w{n}": n for n in range(size)}
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), "utf-8")


def environment(caches: Path, path: str) -> dict[str, str]:
    """Return an environment whose caches are all below one folder."""
    folders = {
        "HOME": "home",
        "XDG_CACHE_HOME": "xdg",
        "CUDA_CACHE_PATH": "driver",
        "VLLM_CACHE_ROOT": "vllm",
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    }
    places = {key: str(caches / folder) for key, folder in folders.items()}
    for place in places.values():
        Path(place).mkdir(parents=True, exist_ok=True)
    return {
        **os.environ,
        **places,
        "PYTHONPATH": path,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "CUDA_CACHE_MAXSIZE": "4294967296",
        "VLLM_USE_DEEP_GEMM": "0",
    }


def cold_start(
    caches: Path, model: Path, path: str, extra: list[str]
) -> dict[str, Any]:
    """Serve with empty caches, and return the seconds to the first token and what was compiled."""
    settings = tomllib.loads(_SETTINGS.read_text("utf-8"))["serve"]
    code = "import sys; from vllm.entrypoints.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", str(model), "--port", str(_PORT)]
    command += [*settings["words"], *settings["random"], *extra]

    env = environment(caches, path)
    log = caches / "server.log"
    compilers: set[str] = set()
    ended = threading.Event()
    watch = threading.Thread(target=watch_compilers, args=(compilers, ended))
    watch.start()

    begin = time.monotonic()
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, env=env, stdout=output, stderr=output, start_new_session=True
        )
        try:
            tokens = first_answer(server, begin)
            seconds = round(time.monotonic() - begin, 1)
        finally:
            ended.set()
            watch.join()
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    lines = log.read_text("utf-8", "replace").splitlines()
    notable = [line[-150:] for line in lines if "seconds" in line or " took " in line]
    if not tokens:
        notable = [line[-200:] for line in lines[-25:]]
    return {
        "seconds": seconds,
        "compilers": sorted(compilers),
        "tokens": hashlib.sha256(tokens.encode()).hexdigest()[:12] if tokens else "",
        "log": notable,
    }


def watch_compilers(compilers: set[str], ended: threading.Event) -> None:
    """Collect the commands of the compilers that run, ten times a second, until ``ended``."""
    while not ended.wait(0.1):
        for comm in Path("/proc").glob("[0-9]*/comm"):
            try:
                name = comm.read_text().strip()
                command = comm.with_name("cmdline").read_bytes()
            except OSError:
                continue
            if name in _COMPILERS:
                compilers.add(command.replace(b"\0", b" ").decode()[:60].strip())


def first_answer(server: subprocess.Popen[bytes], begin: float) -> str:
    """Return the text of a sampled answer; "" where the server ends or the time is over."""
    request = {
        "model": "proof",
        "prompt": "w5 w6 w7 w8",
        "max_tokens": 1,
        "temperature": 1.0,
        "top_k": 50,
        "top_p": 0.9,
        "seed": 3,
    }
    while server.poll() is None and time.monotonic() - begin < _LIMIT:
        try:
            post = urllib.request.Request(
                f"http://127.0.0.1:{_PORT}/v1/completions",
                json.dumps(request).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(post, timeout=120) as answer:
                return json.dumps(json.load(answer)["choices"][0]["text"])
        except OSError:
            time.sleep(0.2)
    return ""


def ask_sampler(caches: Path, path: str) -> str:
    """Return the digest of what FlashInfer's sampler answers with these folders and caches."""
    answer = subprocess.run(
        [sys.executable, "-c", _SAMPLER],
        env=environment(caches, path),
        capture_output=True,
        text=True,
        timeout=300,
    )
    if answer.returncode:
        return f"failed: {answer.stderr[-300:]}"
    return str(json.loads(answer.stdout.splitlines()[-1])["sampler"])


if __name__ == "__main__":
    sys.exit(main())
