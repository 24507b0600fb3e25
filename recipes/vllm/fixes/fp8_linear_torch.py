"""FP8 linear layers without FlashInfer's and vLLM's CUTLASS kernels."""

from functools import partial

from patchkit.recipes.vllm import kit

_OLD = "vllm/model_executor/layers/quantization/utils/w8a8_utils.py"
_OLD_BEFORE = "current_platform.is_cuda() and cutlass_fp8_supported()"
_OLD_AFTER = (
    "current_platform.is_cuda() and cutlass_fp8_supported() and not _torch_on_gb10()"
)
_OLD_HELPER = '''\
def _torch_on_gb10() -> bool:
    """Whether FP8 linear layers take torch._scaled_mm: on capability 12.1."""
    if not current_platform.is_device_capability((12, 1)):
        return False
    from vllm.logger import init_logger

    init_logger(__name__).info_once(
        "patchkit: FP8 linear layers take torch._scaled_mm on 12.1, not CUTLASS "
        "(fp8_linear_torch)"
    )
    return True
'''

_SCOPE = "init_fp8_linear_kernel"
_BEFORE = "_POSSIBLE_FP8_KERNELS"
_AFTER = "_torch_first_on_gb10(_POSSIBLE_FP8_KERNELS)"
_HELPER = '''\
def _torch_first_on_gb10(kernels):
    """The kernels by platform; on capability 12.1, torch._scaled_mm before CUTLASS."""
    if not (
        current_platform.is_cuda() and current_platform.is_device_capability((12, 1))
    ):
        return kernels
    logger.info_once(
        "patchkit: FP8 linear layers prefer torch._scaled_mm on 12.1 to CUTLASS "
        "(fp8_linear_torch)"
    )
    last = (
        "FlashInferFP8ScaledMMLinearKernel",
        "CutlassFP8ScaledMMLinearKernel",
        "B12xTensorFP8ScaledMMLinearKernel",
    )
    platform = current_platform._enum
    ordered = sorted(kernels[platform], key=lambda kernel: kernel.__name__ in last)
    return {**kernels, platform: ordered}
'''


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read a list of kernels in order of preference; before 0.16, one choice in Fp8LinearOp."""
    path = _place(tree)
    form = (_SCOPE, _BEFORE, _AFTER, _HELPER)
    if path == _OLD:
        form = ("Fp8LinearOp.__init__", _OLD_BEFORE, _OLD_AFTER, _OLD_HELPER)
    edits = kit.wrap(path, tree.read(path), *form, note="torch._scaled_mm on 12.1")
    return kit.found(
        edits,
        now=f"{path}: FP8 linear layers prefer CUTLASS on 12.1",
        done=f"{path}: FP8 linear layers prefer torch._scaled_mm on 12.1",
    )


def _place(tree: kit.SourceTree) -> str:
    """Return the file that chooses the kernel."""
    registries = (path for path in kit.REGISTRIES if _SCOPE in (tree.find(path) or ""))
    return next(registries, _OLD)


def prove(case: kit.Case) -> str:
    """Check that 12.1 takes torch for every kind of scale, and all others what they took before."""
    old = _place(case.stock) == _OLD
    kernels = {
        "tensor": "PerTensorTorchFP8ScaledMMLinearKernel",
        "token": "ChannelWiseTorchFP8ScaledMMLinearKernel",
    }
    decisions = [
        kit.Decision(
            f"FP8 linear, one scale per {scales}",
            partial(kit.fp8_linear, scales=scales),
            wanted="torch" if old else kernel,
        )
        for scales, kernel in kernels.items()
    ]
    return "; ".join(kit.prove_decisions(case, decisions))


FIX = kit.Fix(
    title="FP8 linear layers take torch._scaled_mm on 12.1",
    symptom='"This kernel only supports sm120." and a trap in an FP8 model, or a CUTLASS error in '
    "its first linear layer.",
    why="vLLM asks the device's capability, not what was compiled: a 0.19 build for 12.1 compiles "
    "its FP8 kernels to traps, and a build made with CUDA 12 holds 12.0a code that does not load "
    "on 12.1. torch._scaled_mm works in both. Builds that patchkit made need none of this.",
    needs=(
        kit.recommended(
            ">=0.19,<0.20",
            "a wheel built for 12.1 has traps for FP8 kernels",
            target="gb10",
            kind="installed",
        ),
        kit.optional(">=0.11.1", "a way around CUTLASS's FP8 kernels", target="gb10"),
    ),
    upstream="never the default; from 0.22.0 --linear-backend torch does the same",
    look=look,
    prove=prove,
    examples=(
        kit.Example(
            "0.14.1",
            _OLD,
            "class Fp8LinearOp:\n    def __init__(self):\n        "
            f"self.cutlass = {_OLD_BEFORE}\n",
            f"{_OLD_HELPER}\n\nclass Fp8LinearOp:\n    def __init__(self):\n        "
            f"self.cutlass = {_OLD_AFTER}\n",
        ),
        kit.Example(
            "0.25.1",
            kit.REGISTRIES[0],
            f"def {_SCOPE}():\n    return {_BEFORE}\n",
            f"{_HELPER}\n\ndef {_SCOPE}():\n    return {_AFTER}\n",
        ),
    ),
)
