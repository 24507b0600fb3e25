"""Call FlashAttention 2, or build a model, for a proof. Run by the Python that has vLLM.

The script runs one step. It answers and checks products with gpu_script.py, which is in the same
folder. Else it imports only the standard library, torch and vLLM.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_SPEC: Any = importlib.util.spec_from_file_location(
    "gpu_script", Path(__file__).with_name("gpu_script.py")
)
gpu: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(gpu)


def _normal(torch: Any, *shape: int) -> Any:
    return torch.randn(
        *shape,
        device="cuda",
        dtype=torch.bfloat16,
    )


def try_attention(_: dict[str, Any]) -> dict[str, Any]:
    """Call FlashAttention 2 for the first time in this process, and compare with the CPU.

    The attention is causal, with 8 query heads and 2 key heads of size 128; keys and values are
    in pages of 16 tokens. Raise NotRunError if vLLM has FlashAttention in another module.
    """
    torch = gpu._require_gpu()
    torch.manual_seed(0)
    try:
        flash = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    except ModuleNotFoundError as error:
        raise gpu.NotRunError(f"this vLLM has it elsewhere: {error}") from None

    tokens = 64
    length = 511
    heads = 8
    pairs = 2
    size = 128
    pages = -(-length // 16)
    table = torch.randperm(pages, device="cuda").int()

    q = _normal(torch, tokens, heads, size)
    k = _normal(torch, pages, 16, pairs, size)
    v = _normal(torch, pages, 16, pairs, size)

    inputs = [q]
    for cache in (k, v):
        used = cache[table.long()].flatten(0, 1)[:length]
        inputs.append(used.repeat_interleave(heads // pairs, 1))

    mask = torch.ones(tokens, length).tril(length - tokens)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.cpu().double().transpose(0, 1) for tensor in inputs),
        attn_mask=mask.bool(),
    )

    starts = torch.tensor((0, tokens), device="cuda").int()
    lengths = torch.tensor((length,), device="cuda").int()
    torch.cuda.synchronize()
    called = time.perf_counter()
    out = flash.flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q=tokens,
        cu_seqlens_q=starts,
        max_seqlen_k=length,
        causal=True,
        seqused_k=lengths,
        block_table=table.view(1, pages),
        fa_version=2,
    )
    torch.cuda.synchronize()
    seconds = round(time.perf_counter() - called, 3)

    products = [(out.cpu(), exact.transpose(0, 1))]
    answer: dict[str, Any] = gpu._judge_products("fa2", products)
    answer["figures"]["first_s"] = seconds
    return answer


def try_routing(settings: dict[str, Any]) -> dict[str, Any]:
    """Build a model of random weights and generate four tokens.

    The answer is empty: vLLM logs which kernels it chose.
    """
    gpu._require_gpu()
    vllm = importlib.import_module("vllm")
    with tempfile.TemporaryDirectory() as place:
        config = json.dumps(settings["config"])
        Path(place, "config.json").write_text(config, encoding="utf-8")

        engine = vllm.LLM(place, **settings["engine"])

    sampling = vllm.SamplingParams(
        temperature=0,
        max_tokens=4,
        ignore_eos=True,
        detokenize=False,
    )
    engine.generate(
        [{"prompt_token_ids": [5, 6, 7]}],
        sampling,
        use_tqdm=False,
    )
    return {}


if __name__ == "__main__":
    folder = str(Path(__file__).parent)
    sys.path[:] = [path for path in sys.path if path != folder]
    gpu.STEPS.update({"attention": try_attention, "routing": try_routing})
    gpu.main()
