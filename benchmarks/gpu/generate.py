"""One vLLM, one model, one reported capability: which kernels, and which probabilities.

Run by ``routing.py`` in a process of its own, with the vLLM to look at first on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import enum
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import torch

PROMPT_LENGTHS = (1, 3, 8, 17, 33, 64, 100, 128)
NEW_TOKENS = 16
KV_CACHE_BYTES = 256 << 20


def main() -> None:
    """Write ``result.json`` and ``logprobs.npy`` into --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--capability", default="real", metavar="real|M.m")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    try:
        result = run(options.model, options.capability, options.out)
    except Exception as error:  # noqa: BLE001 - the failure is the result
        lines = str(error).strip().splitlines() or [""]
        result = {"error": f"{type(error).__name__}: {lines[-1][:300]}"}
    result["seconds"] = round(time.monotonic() - start, 1)
    (options.out / "result.json").write_text(json.dumps(result, indent=1))


def run(model: Path, capability: str, out: Path) -> dict[str, Any]:
    """Load, look at the kernels, generate, and once more under the profiler."""
    if capability != "real":
        report_capability(*map(int, capability.split(".")))
    import vllm
    from vllm import LLM
    from vllm.platforms import current_platform

    llm = LLM(
        str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=16,
        max_logprobs=-1,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        gpu_memory_utilization=0.05,
        enable_prefix_caching=False,
        # The same everywhere: only the FP8 routing may differ.
        attention_backend="TRITON_ATTN",
        seed=0,
    )
    found: dict[str, Any] = {
        "vllm": vllm.__version__,
        "vllm_file": vllm.__file__,
        "capability": str(current_platform.get_device_capability()),
        "classes": llm.apply_model(kernel_classes)[0],
    }
    (out / "selected.json").write_text(json.dumps(found, indent=1))
    tokens, logprobs = generate(llm)
    numpy.save(out / "logprobs.npy", logprobs)
    return {
        **found,
        "tokens": tokens,
        "finite": bool(numpy.isfinite(logprobs).all()),
    } | {"launched": launched(llm)}


def report_capability(major: int, minor: int) -> None:
    """Let vLLM's Python see another device; compiled and JIT code still see the real one."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    reported = DeviceCapability(major, minor)
    answer = staticmethod(lambda *_, **__: reported)
    type(current_platform).get_device_capability = answer


def kernel_classes(model: torch.nn.Module) -> dict[str, str]:
    """Layer kind -> what its quantisation method holds: kernel objects, backends, experts."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None or "lm_head" in name or "embed" in name:
            continue
        parts = [label for value in vars(method).values() if (label := _label(value))]
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        found[kind] = " ".join([type(method).__name__, *dict.fromkeys(parts)])
    return found


def _label(value: object) -> str:
    if isinstance(value, enum.Enum) and "Backend" in type(value).__name__:
        return f"backend={value.value}"
    if isinstance(value, type):
        return value.__name__ if "Expert" in value.__name__ else ""
    named = type(value).__name__
    return named if named.endswith(("LinearKernel", "MMKernel")) else ""


def generate(llm: Any) -> tuple[list[list[int]], numpy.ndarray]:
    """Greedy tokens, and log-probabilities of the whole vocabulary at every prompt position."""
    from vllm import SamplingParams

    asked = SamplingParams(
        temperature=0,
        max_tokens=NEW_TOKENS,
        prompt_logprobs=-1,
        ignore_eos=True,
        detokenize=False,
    )
    outputs = llm.generate(prompts(), asked, use_tqdm=False)
    rows = [row for output in outputs for row in output.prompt_logprobs if row]
    table = [[row[token].logprob for token in sorted(row)[:VOCABULARY]] for row in rows]
    return [list(output.outputs[0].token_ids) for output in outputs], numpy.array(table)


def launched(llm: Any) -> dict[str, int]:
    """CUDA kernels of one generation and how often each ran, as the profiler saw them."""
    from torch.profiler import ProfilerActivity, profile
    from vllm import SamplingParams

    few = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        llm.generate(prompts(), few, use_tqdm=False)
        torch.cuda.synchronize()
    names = Counter(
        event.name for event in seen.events() if event.device_type.name == "CUDA"
    )
    return {
        name: count for name, count in names.most_common() if not name.startswith("Mem")
    }


def prompts() -> list[dict[str, list[int]]]:
    """Token ids drawn from a fixed seed."""
    draw = numpy.random.default_rng(0)
    return [
        {"prompt_token_ids": draw.integers(2, VOCABULARY, length).tolist()}
        for length in PROMPT_LENGTHS
    ]


VOCABULARY = 512  # models.VOCABULARY; that module needs safetensors

if __name__ == "__main__":
    main()
