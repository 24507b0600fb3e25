"""Call a kernel of vLLM, or build a model, for a proof. Run by the Python that has vLLM.

As doctor's script, whose answers and checks it takes: a step a run, the standard library, torch and
vLLM only.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

_FOUND: Any = importlib.util.spec_from_file_location(
    "gpu_script", Path(__file__).with_name("gpu_script.py")
)
gpu: Any = importlib.util.module_from_spec(_FOUND)
_FOUND.loader.exec_module(gpu)

_TOKENS, _WIDE, _DEEP, _FP8_MAX = 64, 1024, 2048, 448.0
# A call that a GPU answers, and what a CPU computes in float64.
Prepared = tuple[Callable[[], Any], Any]


def try_kernel(settings: dict[str, Any]) -> dict[str, Any]:
    """Call one group's kernel for the first time in this process, and compare with the CPU."""
    torch = gpu._require_gpu()
    torch.manual_seed(0)
    torch.zeros(1, device="cuda")
    prepare, *more = GROUPS[settings["group"]]
    try:
        call, exact = prepare(torch, *more)
    except ModuleNotFoundError as error:
        raise gpu.NotRunError(f"this vLLM has it elsewhere: {error}") from None
    # Layers for experts expect a config around them.
    around = gpu._vllm_groups(torch) if prepare is prepare_experts else nullcontext()
    with around:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        out = call()
        torch.cuda.synchronize()
        first = round(time.perf_counter() - begin, 3)
    answer: dict[str, Any] = gpu._judge_products(
        settings["group"], [(out.cpu(), exact)]
    )
    return {**answer, "figures": {**answer["figures"], "first_s": first}}


def _normal(torch: Any, *shape: int) -> Any:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def prepare_norm(torch: Any) -> Prepared:
    """``_C``: an RMS norm."""
    ops = importlib.import_module("vllm._custom_ops")
    x = _normal(torch, _TOKENS, _DEEP)
    weight = (torch.rand(_DEEP, device="cuda") / 2 + 0.5).bfloat16()
    out, wide = torch.empty_like(x), x.cpu().double()
    exact = (
        wide
        / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        * weight.cpu().double()
    )
    return lambda: (ops.rms_norm(out, x, weight, 1e-6), out)[1], exact


def prepare_attention(torch: Any) -> Prepared:
    """FlashAttention 2 with keys in pages of 16, causal, 8 heads and 2 of keys, size 128."""
    flash = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    queries, keys, heads, pairs, size = (64, 5), (300, 511), 8, 2, 128
    pages = -(-max(keys) // 16)
    table = torch.randperm(2 * pages, device="cuda").int().view(2, pages)
    q = _normal(torch, sum(queries), heads, size)
    k, v = (_normal(torch, 2 * pages, 16, pairs, size) for _ in "kv")
    rows = []
    for number, (asked, held) in enumerate(zip(queries, keys, strict=True)):
        pages_of = table[number].long()
        its = (each[pages_of].flatten(0, 1)[:held] for each in (k, v))
        wide = [each.repeat_interleave(heads // pairs, 1) for each in its]
        wide.insert(0, q[sum(queries[:number]) :][:asked])
        seen = torch.ones(asked, held).tril(held - asked).bool()
        attend = torch.nn.functional.scaled_dot_product_attention
        out = attend(
            *(each.cpu().double().transpose(0, 1) for each in wide), attn_mask=seen
        )
        rows.append(out.transpose(0, 1))
    starts, used = (torch.tensor(it, device="cuda").int() for it in ((0, 64, 69), keys))
    how = {
        "max_seqlen_q": 64,
        "cu_seqlens_q": starts,
        "max_seqlen_k": max(keys),
        "causal": True,
    }
    how |= {"seqused_k": used, "block_table": table, "fa_version": 2}
    return lambda: flash.flash_attn_varlen_func(q, k, v, **how), torch.cat(rows)


def prepare_scaled_mm(torch: Any) -> Prepared:
    """CUTLASS of ``_C``: FP8 by FP8, a scale for each tensor."""
    ops = importlib.import_module("vllm._custom_ops")
    shapes = ((_TOKENS, _DEEP), (_WIDE, _DEEP))
    wide = (
        (_normal(torch, *shape) * 64).clamp(-_FP8_MAX, _FP8_MAX) for shape in shapes
    )
    a, b = (each.to(torch.float8_e4m3fn) for each in wide)
    scales = [torch.tensor([each], device="cuda") for each in (0.01, 0.02)]
    exact = (
        a.cpu().double() @ b.cpu().double().t() * (scales[0] * scales[1]).cpu().double()
    )
    return lambda: ops.cutlass_scaled_mm(a, b.t(), *scales, torch.bfloat16), exact


def prepare_marlin(torch: Any, width: int) -> Prepared:
    """Marlin of ``_C``: bfloat16 by FP8 in groups of 128, or by NVFP4."""
    function = importlib.import_module("vllm._custom_ops").marlin_gemm
    utils = "vllm.model_executor.layers.quantization.utils.marlin_utils"
    kinds = importlib.import_module("vllm.scalar_type").scalar_types
    made = importlib.import_module(f"{utils}_fp{width}")
    a, weight, overall = (
        _normal(torch, _TOKENS, _DEEP),
        _normal(torch, _WIDE, _DEEP),
        None,
    )
    if width == 8:
        exact, packed, scales = made.marlin_quant_fp8_torch(weight, 128)
    else:
        exact, packed, scales, overall = made.rand_marlin_weight_nvfp4_like(weight, 16)
    workspace = importlib.import_module(utils).marlin_make_workspace_new(a.device)
    given = {"a": a, "b_q_weight": packed, "b_scales": scales, "global_scale": overall}
    given |= {
        "size_m": _TOKENS,
        "size_n": _WIDE,
        "size_k": _DEEP,
        "use_fp32_reduce": True,
    }
    kind = kinds.float8_e4m3fn if width == 8 else kinds.float4_e2m1f
    given |= {"workspace": workspace, "b_q_type": kind}
    # Releases until 0.29 also ask for an order of GPTQ's.
    asked = inspect.signature(function).parameters.values()
    given = {it.name: None for it in asked if it.default is it.empty} | given
    return lambda: function(**given), a.cpu().double() @ exact.cpu().double()


def prepare_experts(torch: Any) -> Prepared:
    """``_moe_C`` and Triton: two of eight experts a token, bfloat16."""
    ops = importlib.import_module("vllm._custom_ops")
    layer = importlib.import_module("vllm.model_executor.layers.fused_moe")
    experts, deep, wide = 8, 512, 256
    x, gates = (
        _normal(torch, _TOKENS, deep),
        torch.randn(_TOKENS, experts, device="cuda"),
    )
    up = _normal(torch, experts, 2 * wide, deep) / deep**0.5
    down = _normal(torch, experts, deep, wide) / wide**0.5
    weights = torch.empty(_TOKENS, 2, device="cuda")
    ids, order = (
        torch.empty(_TOKENS, 2, device="cuda", dtype=torch.int32) for _ in "io"
    )

    def call() -> Any:
        ops.topk_softmax(weights, ids, order, gates, True)
        return layer.fused_experts(x, up, down, weights, ids)

    shares, chosen = gates.cpu().double().softmax(-1).topk(2)
    shares /= shares.sum(-1, keepdim=True)
    wide_x, wide_up, wide_down = (each.cpu().double() for each in (x, up, down))
    gate, value = torch.einsum("td,tewd->tew", wide_x, wide_up[chosen]).chunk(2, -1)
    each = torch.einsum(
        "tew,tedw->ted", gate * gate.sigmoid() * value, wide_down[chosen]
    )
    return call, (each * shares[..., None]).sum(1)


def try_routing(settings: dict[str, Any]) -> dict[str, Any]:
    """Build a model of random weights and ask it for tokens; the log says what was chosen."""
    gpu._require_gpu()
    vllm = importlib.import_module("vllm")
    with tempfile.TemporaryDirectory() as place:
        Path(place, "config.json").write_text(
            json.dumps(settings["config"]), encoding="utf-8"
        )
        engine = vllm.LLM(place, **settings["engine"])
    asked = vllm.SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, detokenize=False
    )
    engine.generate([{"prompt_token_ids": [5, 6, 7]}], asked, use_tqdm=False)
    return {}


GROUPS: dict[str, tuple[Any, ...]] = {
    "norm": (prepare_norm,),
    "fa2": (prepare_attention,),
    "scaled-mm": (prepare_scaled_mm,),
    "marlin-fp8": (prepare_marlin, 8),
    "marlin-fp4": (prepare_marlin, 4),
    "experts": (prepare_experts,),
}

if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    gpu.STEPS.update({"kernel": try_kernel, "routing": try_routing})
    gpu.main()
