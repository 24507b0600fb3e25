"""Which backend a release takes for an FP8 MoE layer; no fix asks that."""

from patchkit.proof.upstream_code import Code
from patchkit.recipes.vllm.decisions import SCALES, Off, select_backend

FP8_MOE = "vllm/model_executor/layers/fused_moe/oracle/fp8.py"
_OLDER = "vllm/model_executor/layers/quantization/fp8.py"


def fp8_moe(code: Code, scales: str, *, compressed_tensors: bool = False) -> str:
    """Return the backend of an FP8 MoE layer; compressed-tensors may take vLLM's CUTLASS."""
    select = "select_fp8_moe_backend"
    arguments: dict[str, object] = {
        "block_quant": scales == "block",
        "with_lora_support": False,
    }
    if code.has(FP8_MOE, select):
        arguments |= {"allow_vllm_cutlass": compressed_tensors, "tp_size": 1}
        return select_backend(
            code, code.get(FP8_MOE, select), arguments, SCALES[scales]
        )

    older = code.get(_OLDER, "get_fp8_moe_backend")
    parallel = {"moe_parallel_config": Off(tp_size=1)}
    return select_backend(code, older, arguments | parallel, SCALES[scales])
