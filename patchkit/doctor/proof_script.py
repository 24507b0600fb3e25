"""Call a kernel of vLLM, or build a model, for a proof. Run by the Python that has vLLM.

The script runs one step, with the answers and checks of doctor's gpu_script.py beside it. It
imports the standard library, torch and vLLM only.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SPEC: Any = importlib.util.spec_from_file_location(
    "gpu_script", Path(__file__).with_name("gpu_script.py")
)
gpu: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(gpu)

_TOKENS = 64
# A call that a GPU answers, and what a CPU computes in float64.
Prepared = tuple[Callable[[], Any], Any]


def try_kernel(settings: dict[str, Any]) -> dict[str, Any]:
    """Call one group's kernel for the first time in this process, and compare with the CPU."""
    torch = gpu._require_gpu()
    torch.manual_seed(0)
    torch.zeros(1, device="cuda")
    prepare = GROUPS[settings["group"]]
    try:
        call, exact = prepare(torch)
    except ModuleNotFoundError as error:
        raise gpu.NotRunError(f"this vLLM has it elsewhere: {error}") from None

    # Layers for experts need a config around them.
    with gpu._vllm_groups(torch):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        out = call()
        torch.cuda.synchronize()
        seconds = round(time.perf_counter() - begin, 3)

    products = [(out.cpu(), exact)]
    answer: dict[str, Any] = gpu._judge_products(settings["group"], products)
    answer["figures"]["first_s"] = seconds
    return answer


def _normal(torch: Any, *shape: int) -> Any:
    return torch.randn(
        *shape,
        device="cuda",
        dtype=torch.bfloat16,
    )


def _exact(tensor: Any) -> Any:
    return tensor.cpu().double()


def prepare_attention(torch: Any) -> Prepared:
    """FlashAttention 2 with keys in pages of 16, causal, 8 heads and 2 of keys, size 128."""
    flash = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    queries = (64, 5)
    keys = (300, 511)
    heads = 8
    pairs = 2
    size = 128
    pages = -(-max(keys) // 16)
    order = torch.randperm(2 * pages, device="cuda")
    table = order.int().view(2, pages)

    q = _normal(torch, sum(queries), heads, size)
    k = _normal(torch, 2 * pages, 16, pairs, size)
    v = _normal(torch, 2 * pages, 16, pairs, size)

    rows = []
    sequences = zip(queries, keys, strict=True)
    for number, (tokens, length) in enumerate(sequences):
        in_use = table[number].long()
        begin = sum(queries[:number])
        wide = [q[begin : begin + tokens]]
        for cache in (k, v):
            used = cache[in_use].flatten(0, 1)[:length]
            wide.append(used.repeat_interleave(heads // pairs, 1))

        mask = torch.ones(tokens, length).tril(length - tokens)
        out = torch.nn.functional.scaled_dot_product_attention(
            *(_exact(tensor).transpose(0, 1) for tensor in wide),
            attn_mask=mask.bool(),
        )

        rows.append(out.transpose(0, 1))

    starts = torch.tensor((0, 64, 69), device="cuda").int()
    lengths = torch.tensor(keys, device="cuda").int()

    def call() -> Any:
        return flash.flash_attn_varlen_func(
            q,
            k,
            v,
            max_seqlen_q=64,
            cu_seqlens_q=starts,
            max_seqlen_k=max(keys),
            causal=True,
            seqused_k=lengths,
            block_table=table,
            fa_version=2,
        )

    return call, torch.cat(rows)


def prepare_experts(torch: Any) -> Prepared:
    """``_moe_C`` and Triton: two of eight experts a token, bfloat16."""
    ops = importlib.import_module("vllm._custom_ops")
    layer = importlib.import_module("vllm.model_executor.layers.fused_moe")
    experts = 8
    deep = 512
    wide = 256

    x = _normal(torch, _TOKENS, deep)
    gates = torch.randn(_TOKENS, experts, device="cuda")
    up = _normal(torch, experts, 2 * wide, deep) / deep**0.5
    down = _normal(torch, experts, deep, wide) / wide**0.5

    weights = torch.empty(_TOKENS, 2, device="cuda")
    ids = torch.empty(
        _TOKENS,
        2,
        device="cuda",
        dtype=torch.int32,
    )
    order = torch.empty_like(ids)

    def call() -> Any:
        ops.topk_softmax(weights, ids, order, gates, True)
        return layer.fused_experts(x, up, down, weights, ids)

    shares, chosen = _exact(gates).softmax(-1).topk(2)

    shares /= shares.sum(-1, keepdim=True)
    up_chosen = _exact(up)[chosen]
    inner = torch.einsum("td,tewd->tew", _exact(x), up_chosen)

    gate, value = inner.chunk(2, -1)

    active = gate * gate.sigmoid() * value
    by_expert = torch.einsum("tew,tedw->ted", active, _exact(down)[chosen])
    return call, (by_expert * shares[..., None]).sum(1)


def try_routing(settings: dict[str, Any]) -> dict[str, Any]:
    """Build a model of random weights and ask it for tokens; the log says what was chosen."""
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


GROUPS = {
    "fa2": prepare_attention,
    "experts": prepare_experts,
}

if __name__ == "__main__":
    folder = str(Path(__file__).parent)
    sys.path[:] = [path for path in sys.path if path != folder]
    gpu.STEPS.update({"kernel": try_kernel, "routing": try_routing})
    gpu.main()
