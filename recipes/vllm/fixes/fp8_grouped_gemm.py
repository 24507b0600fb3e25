"""The gate that promises an FP8 grouped GEMM that no SM12x build contains."""

from types import SimpleNamespace

from packaging.version import Version

from patchkit.recipes.vllm import kit

_PATH = "vllm/model_executor/layers/quantization/utils/w8a8_utils.py"
_SCOPE = "cutlass_group_gemm_supported"
_COMPILED = "csrc/**/w8a8/cutlass/scaled_mm_entry.cu"
_COMPILED_GATE = "bool cutlass_group_gemm_supported("
_FIXED_IN = Version("0.24.0")  # for installed packages, whose C++ cannot be read

_BEFORE = """\
def cutlass_group_gemm_supported() -> bool:
    if not current_platform.is_cuda():
        return False

    capability_tuple = current_platform.get_device_capability()
    capability = -1 if capability_tuple is None else capability_tuple.to_int()

    return ops.cutlass_group_gemm_supported(capability)
"""
_AFTER = """\
def cutlass_group_gemm_supported() -> bool:
    if not current_platform.is_cuda():
        return False

    capability_tuple = current_platform.get_device_capability()
    capability = -1 if capability_tuple is None else capability_tuple.to_int()

    # The compiled gate says yes from 10.0 on, but no SM12x grouped GEMM is built.
    if capability // 10 == 12:
        from vllm.logger import init_logger

        init_logger(__name__).info_once(
            "patchkit: no CUTLASS FP8 grouped GEMM on SM12x, for none is built "
            "(fp8_grouped_gemm)"
        )
        return False

    return ops.cutlass_group_gemm_supported(capability)
"""


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read the compiled gate, which decides whether the Python one needs help."""
    installed = tree.kind == "installed"
    if installed and tree.version >= _FIXED_IN:
        return kit.upstream("the compiled gate says no to SM12x")
    for path in () if installed else tree.containing(_COMPILED, _COMPILED_GATE):
        text = tree.read(path)
        start = text.index(_COMPILED_GATE)
        if "cuda_device_capability < 120" in text[start : text.index("\n}", start)]:
            return kit.upstream(f"{path} says no to SM12x")
    edits = kit.swap(
        _PATH, tree.read(_PATH), _SCOPE, _BEFORE, _AFTER, note="no SM12x grouped GEMM"
    )
    return kit.found(
        edits,
        now=f"{_PATH}: {_SCOPE} says yes to SM12x",
        done=f"{_PATH}: {_SCOPE} says no to SM12x",
    )


def prove(case: kit.Case) -> str:
    """Check that 12.x gets no, and all others what they got before."""
    what = "CUTLASS FP8 grouped GEMM"
    return kit.prove_decision(
        case, what, _decide_backend, wanted=False, changed=kit.SM12X
    )


def _decide_backend(code: kit.Code) -> object:
    # What the compiled gate of these releases says.
    gate = SimpleNamespace(cutlass_group_gemm_supported=lambda cc: cc >= 90)
    code.put(_PATH, "ops", gate)
    return code.get(_PATH, _SCOPE)()


FIX = kit.Fix(
    title="No CUTLASS FP8 grouped GEMM on SM12x",
    symptom="A compressed-tensors FP8 MoE model stops at the first request with a CUTLASS error: "
    "no cutlass_moe_mm kernel for the device.",
    why="cutlass_group_gemm_supported answers yes for every capability from 10.0 on, so the FP8 "
    "MoE oracle picks VLLM_CUTLASS; the sources have grouped GEMMs for SM90 and SM100 only.",
    needs=(
        kit.required(
            ">=0.14,<0.24", "compressed-tensors FP8 MoE picks a missing kernel"
        ),
    ),
    upstream="0.24.0: the compiled gate answers per compiled arch",
    look=look,
    prove=prove,
    examples=(
        kit.Example(
            "0.19.1",
            _PATH,
            _BEFORE,
            _AFTER,
        ),
    ),
)
