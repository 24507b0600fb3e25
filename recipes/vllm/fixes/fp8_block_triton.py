"""Block-scaled FP8 linear layers on Triton."""

from textwrap import indent

from patchkit.recipes.vllm import kit

_OLD = "vllm/model_executor/layers/quantization/utils/fp8_utils.py"
_OLD_CLASS = "W8A8BlockFp8LinearOp"
_OLD_BEFORE = """\
self._dispatch_w8a8_blockscale_op(cutlass_block_fp8_supported, use_aiter_and_is_supported)
"""
_OLD_AFTER = """\
self._dispatch_w8a8_blockscale_op(
    cutlass_block_fp8_supported and not _triton_on_gb10(), use_aiter_and_is_supported
)
"""
_OLD_HELPER = '''\
def _triton_on_gb10() -> bool:
    """Whether block-scaled FP8 linear layers take Triton: on capability 12.1."""
    if not (
        current_platform.is_cuda() and current_platform.is_device_capability((12, 1))
    ):
        return False
    logger.info_once(
        "patchkit: block-scaled FP8 linear layers take Triton on 12.1, not CUTLASS "
        "(fp8_block_triton)"
    )
    return True
'''

_PATH = kit.REGISTRIES[0]
_SCOPE = "init_fp8_linear_kernel"
_BEFORE = "_POSSIBLE_FP8_BLOCK_KERNELS"
_AFTER = "_triton_first_on_gb10(_POSSIBLE_FP8_BLOCK_KERNELS)"
_HELPER = '''\
def _triton_first_on_gb10(kernels):
    """The kernels by platform; on capability 12.1, Triton's first."""
    if not (
        current_platform.is_cuda() and current_platform.is_device_capability((12, 1))
    ):
        return kernels
    logger.info_once(
        "patchkit: block-scaled FP8 linear layers prefer Triton on 12.1 to CUTLASS "
        "and DeepGEMM (fp8_block_triton)"
    )
    platform = current_platform._enum
    ordered = sorted(
        kernels[platform], key=lambda kernel: kernel is not TritonFp8BlockScaledMMKernel
    )
    return {**kernels, platform: ordered}
'''


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read a list of kernels in order of preference; before 0.20, one choice in an operator."""
    path = _PATH
    form = (_SCOPE, _BEFORE, _AFTER, _HELPER)
    if _OLD_CLASS in tree.read(_OLD):
        path = _OLD
        form = (f"{_OLD_CLASS}.__init__", _OLD_BEFORE, _OLD_AFTER, _OLD_HELPER)
    return kit.found(
        kit.wrap(path, tree.read(path), *form, note="Triton on 12.1"),
        now=f"{path}: block-scaled FP8 linear layers prefer CUTLASS or DeepGEMM on 12.1",
        done=f"{path}: block-scaled FP8 linear layers prefer Triton on 12.1",
    )


def prove(case: kit.Case) -> str:
    """Check that 12.1 takes Triton, and all others what they took before."""
    return kit.prove_decision(
        case,
        "FP8 linear, one scale per block",
        lambda code: kit.fp8_linear(code, "block"),
        wanted="_run_triton"
        if _OLD_CLASS in case.stock.read(_OLD)
        else "TritonFp8BlockScaledMMKernel",
    )


FIX = kit.Fix(
    title="Block-scaled FP8 linear layers take Triton on 12.1",
    symptom="A CUTLASS or DeepGEMM error, or wrong numbers, in the linear layers of a block-FP8 "
    "model (Qwen3 FP8, DeepSeek).",
    why="CUTLASS's block kernels, and from 0.24 DeepGEMM's, come before Triton's. On a complete "
    "build they are meant to work on 12.1, so this is a way around, not a cure.",
    needs=(
        kit.optional(
            ">=0.11.1", "a way around CUTLASS's and DeepGEMM's kernels", target="gb10"
        ),
    ),
    upstream="never the default; from 0.22.0 --linear-backend triton does the same",
    look=look,
    prove=prove,
    examples=(
        kit.Example(
            "0.19.1",
            _OLD,
            f"class {_OLD_CLASS}:\n    def __init__(self):\n        {_OLD_BEFORE}",
            f"{_OLD_HELPER}\n\nclass {_OLD_CLASS}:\n    def __init__(self):\n"
            f"{indent(_OLD_AFTER, ' ' * 8)}",
        ),
        kit.Example(
            "0.25.1",
            _PATH,
            f"def {_SCOPE}():\n    return {_BEFORE}\n",
            f"{_HELPER}\n\ndef {_SCOPE}():\n    return {_AFTER}\n",
            beside={_OLD: "# the operator is gone\n"},
        ),
    ),
)
