"""What ``kernels.py`` asks each operator: inputs, the same arithmetic in float64, tolerances."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

TOKENS, HIDDEN, WIDE, GROUP = 64, 512, 1024, 128
FP8, FP8_MAX = torch.float8_e4m3fn, 448.0
BFLOAT16 = (
    2.0**-8
)  # relative error of one rounding: bfloat16 has eight bits of significand
# Matrix products, largest error in units of the result's root mean square. The largest of a million
# values is near 5 of these, and rounding a number between 4 and 8 costs up to 4 * 2^-8 = 0.016.
# Hopper's FP8 tensor cores keep about 13 bits of a running sum: 16 steps of 32 products, 0.01.
# Half as much again is the limit; a wrong scale or a swapped row costs 0.1 and more.
PRODUCT = 0.04
# Element by element: two roundings to bfloat16 (an intermediate one and the result), and as much
# again for exp and rsqrt approximations.
ELEMENT = 4 * BFLOAT16
# Quantised values: FP8 e4m3 is half a step away at most; 1 % for a scale that was inverted first.
HALF_STEP = 1.01
EXACT = 0.0

Measured = Iterator[tuple[str, float, float]]  # what, error, limit


def product(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest error in units of the exact result's root mean square; NaN counts as infinite."""
    return worst((got.double() - exact).abs() / exact.square().mean().sqrt())


def element(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest relative error of an element."""
    return worst((got.double() - exact).abs() / exact.abs().clamp_min(1e-30))


def worst(errors: torch.Tensor) -> float:
    return float(errors.nan_to_num(nan=math.inf).max())


def different(got: torch.Tensor, exact: torch.Tensor) -> float:
    """How many elements differ at all."""
    return float((got != exact).sum())


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16)


def to_fp8(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (values.double() / scale.double()).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def half_steps(
    stored: torch.Tensor, scale: torch.Tensor, values: torch.Tensor
) -> float:
    """Largest distance of FP8 values from what they stand for, in half steps of the format.

    e4m3 has three bits of mantissa: half a step is 2^-4 of the value, or 2^-10 below 2^-6.
    """
    scale, values = scale.double(), values.double()
    half = torch.maximum(values.abs() * 2.0**-4, scale * 2.0**-10)
    return worst((stored.double() * scale - values).abs() / half)


def rms_norm() -> Measured:
    from vllm import _custom_ops as ops

    x, weight, out = normal(TOKENS, HIDDEN), normal(HIDDEN), normal(TOKENS, HIDDEN)
    ops.rms_norm(out, x, weight, 1e-6)
    yield "bfloat16", element(out, _normalised(x, weight)), ELEMENT


def fused_add_rms_norm() -> Measured:
    from vllm import _custom_ops as ops

    x, residual, weight = normal(TOKENS, HIDDEN), normal(TOKENS, HIDDEN), normal(HIDDEN)
    added = x + residual
    ops.fused_add_rms_norm(x, residual, weight, 1e-6)
    yield "residual", different(residual, added), EXACT
    yield "bfloat16", element(x, _normalised(added, weight)), ELEMENT


def _normalised(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()


def silu_and_mul() -> Measured:
    x, out = normal(TOKENS, 2 * HIDDEN), normal(TOKENS, HIDDEN)
    torch.ops._C.silu_and_mul(out, x)
    gate, up = x.double().chunk(2, -1)
    yield "bfloat16", element(out, gate * gate.sigmoid() * up), ELEMENT


def rotary_embedding() -> Measured:
    from vllm import _custom_ops as ops

    heads, size = 4, 64
    angles = torch.arange(256.0)[:, None] * 10000 ** (-torch.arange(0, size, 2) / size)
    cache = torch.cat([angles.cos(), angles.sin()], -1).bfloat16()
    positions, query = torch.randint(0, 256, (TOKENS,)), normal(TOKENS, heads * size)
    key = normal(TOKENS, size)
    first, second = query.double().view(TOKENS, heads, size).chunk(2, -1)
    cos, sin = cache[positions].double()[:, None].chunk(2, -1)
    exact = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    ops.rotary_embedding(positions, query, key, size, cache, True)
    # Both products and their difference may be rounded, each a number below 8.
    yield (
        "neox, bfloat16",
        worst((query.view_as(exact).double() - exact).abs()),
        16 * BFLOAT16,
    )


def topk_softmax() -> Measured:
    from vllm import _custom_ops as ops

    gates, k = torch.randn(TOKENS, 8), 2
    weights, ids = torch.empty(TOKENS, k), torch.empty(TOKENS, k, dtype=torch.int32)
    ops.topk_softmax(weights, ids, torch.empty_like(ids), gates, True)
    exact, order = gates.double().softmax(-1).topk(k)
    yield "experts", different(ids, order), EXACT
    # float32, and exp in its fast form: 2^-21 of the value.
    yield "weights", worst((weights - exact / exact.sum(-1, keepdim=True)).abs()), 1e-5


def moe_align_block_size() -> Measured:
    for tokens in (TOKENS, 4096):  # below and above 1024 choices other kernels run
        yield from _aligned(tokens, experts=8, block=16, k=2)


def _aligned(tokens: int, experts: int, block: int, k: int) -> Measured:
    from vllm import _custom_ops as ops

    ids = torch.rand(tokens, experts).topk(k).indices.int()
    longest = ids.numel() + experts * (block - 1)
    order = torch.empty(longest, dtype=torch.int32)
    owners = torch.empty(-(-longest // block), dtype=torch.int32)
    length = torch.empty(1, dtype=torch.int32)
    ops.moe_align_block_size(ids, experts, block, order, owners, length)
    flat, counts = ids.flatten().long(), ids.flatten().bincount(minlength=experts)
    blocks = (counts + block - 1) // block
    yield f"{tokens} tokens, length", abs(float(length - blocks.sum() * block)), EXACT
    used = int(length) // block
    yield (
        "owners",
        different(owners[:used], torch.arange(experts).repeat_interleave(blocks)),
        EXACT,
    )
    rows = order[: int(length)].long()
    real = rows < flat.numel()
    yield (
        "each once",
        different(rows[real].sort().values, torch.arange(flat.numel())),
        EXACT,
    )
    owner = owners[:used].long().repeat_interleave(block)
    yield "in the expert's block", different(flat[rows[real]], owner[real]), EXACT


def moe_sum() -> Measured:
    from vllm import _custom_ops as ops

    parts, out = normal(TOKENS, 2, HIDDEN), normal(TOKENS, HIDDEN)
    ops.moe_sum(parts, out)
    scale = (
        parts.double().abs().sum(1).clamp_min(1e-30)
    )  # the generator draws some zeros
    yield (
        "bfloat16",
        worst((out.double() - parts.double().sum(1)).abs() / scale),
        ELEMENT,
    )


def scaled_fp8_quant() -> Measured:
    from vllm import _custom_ops as ops

    x = normal(TOKENS, HIDDEN)
    scale = torch.tensor([0.02])
    stored, _ = ops.scaled_fp8_quant(x, scale)
    yield "static", half_steps(stored, scale, x), HALF_STEP
    stored, scale = ops.scaled_fp8_quant(x)
    yield "dynamic", half_steps(stored, scale, x), HALF_STEP
    yield "its scale", element(scale, x.double().abs().max() / FP8_MAX), 1e-6
    stored, scale = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    yield "per token", half_steps(stored, scale, x), HALF_STEP
    yield (
        "its scales",
        element(scale, x.double().abs().amax(1, keepdim=True) / FP8_MAX),
        1e-6,
    )


def per_token_group_fp8_quant() -> Measured:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import (
        per_token_group_quant_fp8,
    )

    x = normal(TOKENS, HIDDEN)
    stored, scales = per_token_group_quant_fp8(x, GROUP, use_ue8m0=False)
    yield (
        "groups of 128",
        half_steps(stored, scales.repeat_interleave(GROUP, 1), x),
        HALF_STEP,
    )


def scaled_int8_quant() -> Measured:
    from vllm import _custom_ops as ops

    x = normal(TOKENS, HIDDEN)
    stored, scales, _ = ops.scaled_int8_quant(x)
    error = (stored.double() * scales.double() - x.double()).abs() / scales.double()
    yield "per token, in steps", worst(error), 0.5 * HALF_STEP


def cutlass_scaled_mm() -> Measured:
    a, b = normal(TOKENS, HIDDEN), normal(WIDE, HIDDEN)
    yield (
        "FP8 per tensor",
        _scaled_mm(a, b, a.abs().max().view(1), b.abs().max().view(1)),
        PRODUCT,
    )
    rows = a.abs().amax(1, keepdim=True), b.abs().amax(1, keepdim=True)
    yield "FP8 per token and channel", _scaled_mm(a, b, *rows), PRODUCT
    yield "FP8, 1 token", _scaled_mm(a[:1], b, rows[0][:1], rows[1]), PRODUCT
    many = normal(2048, HIDDEN)
    yield (
        "FP8, 2048 tokens",
        _scaled_mm(many, b, many.abs().amax(1, keepdim=True), rows[1]),
        PRODUCT,
    )


def _scaled_mm(
    a: torch.Tensor, b: torch.Tensor, most_a: torch.Tensor, most_b: torch.Tensor
) -> float:
    """``most_…`` are the largest absolute values: of the whole, or of each row."""
    from vllm import _custom_ops as ops

    scale_a, scale_b = most_a.float() / FP8_MAX, most_b.float() / FP8_MAX
    left, right = to_fp8(a, scale_a), to_fp8(b, scale_b)
    scales = scale_a, scale_b.view(1, -1) if scale_b.numel() > 1 else scale_b
    out = ops.cutlass_scaled_mm(left, right.t(), *scales, torch.bfloat16)
    exact = (left.double() * scale_a.double()) @ (right.double() * scale_b.double()).t()
    return product(out, exact)


def cutlass_scaled_mm_block() -> Measured:
    from vllm import _custom_ops as ops

    a, b = normal(TOKENS, HIDDEN), normal(WIDE, HIDDEN)
    groups = a.view(TOKENS, -1, GROUP).abs().amax(2).float() / FP8_MAX
    blocks = (
        b.view(WIDE // GROUP, GROUP, -1, GROUP).abs().amax((1, 3)).float() / FP8_MAX
    )
    by_column = groups.repeat_interleave(GROUP, 1)
    by_block = blocks.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    left, right = to_fp8(a, by_column), to_fp8(b, by_block)
    column_major = groups.t().contiguous().t()
    out = ops.cutlass_scaled_mm(
        left, right.t(), column_major, blocks.t(), torch.bfloat16
    )
    exact = (left.double() * by_column.double()) @ (
        right.double() * by_block.double()
    ).t()
    yield "FP8, 1x128 by 128x128", product(out, exact), PRODUCT


def cutlass_scaled_mm_int8() -> Measured:
    from vllm import _custom_ops as ops

    a = torch.randint(-127, 128, (TOKENS, HIDDEN), dtype=torch.int8)
    b = torch.randint(-127, 128, (WIDE, HIDDEN), dtype=torch.int8)
    scales = torch.rand(TOKENS, 1) + 0.5, torch.rand(1, WIDE) + 0.5
    out = ops.cutlass_scaled_mm(a, b.t(), *scales, torch.bfloat16)
    exact = (a.double() @ b.double().t()) * scales[0].double() * scales[1].double()
    yield "int8 per token and channel", product(out, exact), PRODUCT


def cutlass_moe_mm() -> Measured:
    from vllm import _custom_ops as ops

    counts = [16, 48, 0, 128]
    starts = torch.tensor([0, 16, 64, 64])
    sizes = torch.tensor([[rows, WIDE, HIDDEN] for rows in counts], dtype=torch.int32)
    a, b = normal(sum(counts), HIDDEN), normal(len(counts), WIDE, HIDDEN)
    scale_a = a.abs().amax(1, keepdim=True).float() / FP8_MAX
    scale_b = b.abs().amax(2, keepdim=True).float() / FP8_MAX
    left, right = to_fp8(a, scale_a), to_fp8(b, scale_b)
    out = torch.zeros(len(a), WIDE, dtype=torch.bfloat16)
    strides = [torch.full((len(counts),), step) for step in (HIDDEN, HIDDEN, WIDE)]
    ops.cutlass_moe_mm(
        out,
        left,
        right.transpose(1, 2),
        scale_a,
        scale_b[..., 0],
        starts,
        sizes,
        *strides,
        True,
        True,
    )
    owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    weights = (right.double() * scale_b.double())[owner]
    exact = torch.einsum("rk,rnk->rn", left.double() * scale_a.double(), weights)
    yield "FP8, 4 experts, one without tokens", product(out, exact), PRODUCT


def marlin_gemm() -> Measured:
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp8 import (
        marlin_quant_fp8_torch,
    )
    from vllm.model_executor.layers.quantization.utils.marlin_utils_test import (
        marlin_quantize,
    )
    from vllm.scalar_type import scalar_types

    a, weight = normal(TOKENS, HIDDEN), normal(WIDE, HIDDEN)
    for group in (-1, GROUP):
        exact, packed, scales = marlin_quant_fp8_torch(weight, group)
        out = _marlin(a, packed, scales, scalar_types.float8_e4m3fn)
        label = "per channel" if group < 0 else f"groups of {group}"
        yield (
            f"FP8 weights, {label}",
            product(out, a.double() @ exact.double()),
            PRODUCT,
        )
    kind = scalar_types.uint4b8
    exact, packed, scales, index, order, _ = marlin_quantize(
        weight.t(), kind, GROUP, False
    )
    out = _marlin(a, packed, scales, kind, index, order)
    yield "GPTQ int4 weights", product(out, a.double() @ exact.double()), PRODUCT


def _marlin(
    a: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    kind: object,
    index: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
) -> torch.Tensor:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.marlin_utils import (
        marlin_make_workspace_new,
    )

    return ops.marlin_gemm(
        a=a,
        c=None,
        b_q_weight=packed,
        b_bias=None,
        b_scales=scales,
        a_scales=None,
        global_scale=None,
        b_zeros=None,
        g_idx=index,
        perm=order,
        workspace=marlin_make_workspace_new(a.device),
        b_q_type=kind,
        size_m=TOKENS,
        size_n=WIDE,
        size_k=HIDDEN,
        use_fp32_reduce=True,
    )


def machete_mm() -> Measured:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        pack_rows,
        quantize_weights,
    )
    from vllm.scalar_type import scalar_types

    a, weight, kind = normal(TOKENS, HIDDEN), normal(HIDDEN, WIDE), scalar_types.uint4b8
    exact, stored, scales, _ = quantize_weights(weight, kind, GROUP)
    packed = pack_rows(stored, kind.size_bits, *stored.shape).t().contiguous().t()
    ready = ops.machete_prepack_B(packed, a.dtype, kind, scales.dtype)
    out = ops.machete_mm(a, ready, kind, b_group_scales=scales, b_group_size=GROUP)
    yield (
        "int4 weights, groups of 128",
        product(out, a.double() @ exact.double()),
        PRODUCT,
    )


def reshape_and_cache_flash() -> Measured:
    from vllm import _custom_ops as ops

    blocks, block, heads, size = 16, 16, 2, 64
    key, value = normal(TOKENS, heads, size), normal(TOKENS, heads, size)
    slots = torch.randperm(blocks * block)[:TOKENS]
    one, scale = torch.ones(1), torch.tensor([0.02])
    caches = torch.zeros(2, blocks, block, heads, size, dtype=torch.bfloat16)
    ops.reshape_and_cache_flash(key, value, *caches, slots, "auto", one, one)
    found = caches.view(2, -1, heads, size)[:, slots]
    yield "bfloat16", different(found, torch.stack([key, value])), EXACT
    untouched = caches.view(2, -1, heads, size).abs().sum((0, 2, 3)) == 0
    yield "other slots", abs(float(untouched.sum()) - (blocks * block - TOKENS)), EXACT
    stored = torch.zeros(2, blocks, block, heads, size, dtype=torch.uint8)
    ops.reshape_and_cache_flash(key, value, *stored, slots, "fp8", scale, scale)
    found = stored.view(FP8).view(2, -1, heads, size)[:, slots]
    yield "FP8", half_steps(found, scale, torch.stack([key, value])), HALF_STEP


def reshape_and_cache() -> Measured:
    from vllm import _custom_ops as ops

    blocks, block, heads, size, lanes = 16, 16, 2, 64, 8
    key, value = normal(TOKENS, heads, size), normal(TOKENS, heads, size)
    slots, one = torch.randperm(blocks * block)[:TOKENS], torch.ones(1)
    keys = torch.zeros(blocks, heads, size // lanes, block, lanes, dtype=torch.bfloat16)
    values = torch.zeros(blocks, heads, size, block, dtype=torch.bfloat16)
    ops.reshape_and_cache(key, value, keys, values, slots, "auto", one, one)
    found = keys.permute(0, 3, 1, 2, 4).reshape(-1, heads, size)[slots]
    yield "keys, bfloat16", different(found, key), EXACT
    found = values.permute(0, 3, 1, 2).reshape(-1, heads, size)[slots]
    yield "values, bfloat16", different(found, value), EXACT


CHECKS: dict[str, Callable[[], Measured]] = {
    check.__name__: check
    for check in (
        rms_norm,
        fused_add_rms_norm,
        silu_and_mul,
        rotary_embedding,
        topk_softmax,
        moe_align_block_size,
        moe_sum,
        scaled_fp8_quant,
        per_token_group_fp8_quant,
        scaled_int8_quant,
        cutlass_scaled_mm,
        cutlass_scaled_mm_block,
        cutlass_scaled_mm_int8,
        cutlass_moe_mm,
        marlin_gemm,
        machete_mm,
        reshape_and_cache_flash,
        reshape_and_cache,
    )
}
