"""FlashInfer's CuTe-DSL GEMM for NVFP4 linear layers on SM12x, if it is asked for."""

from functools import partial
from types import SimpleNamespace

from patchkit.recipes.vllm import kit

_PATH = "vllm/model_executor/kernels/linear/nvfp4/flashinfer.py"
_CLASS = "FlashInferCuteDslNvFp4LinearKernel"
_BEFORE = "current_platform.is_device_capability_family(100)"
_AFTER = f"({_BEFORE} or _asked_for_on_sm12x())"
_ASKED = '''\
def _asked_for_on_sm12x() -> bool:
    """Whether --linear-backend names the kernel, and FlashInfer has it for this SM12x."""
    from vllm.model_executor.kernels.linear import _get_linear_backend

    if not (has_flashinfer() and current_platform.is_device_capability_family(120)):
        return False
    if _get_linear_backend(quantization="nvfp4_w4a4") != "flashinfer_cutedsl":
        return False
    from flashinfer import mm_fp4

    capability = current_platform.get_device_capability().to_int()
    return mm_fp4.is_backend_supported("cute-dsl", capability)
'''


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read on which devices the kernel may be taken."""
    text = tree.read(_PATH)
    scope = f"{_CLASS}.is_supported"
    edits = kit.wrap(
        _PATH, text, scope, _BEFORE, _AFTER, _ASKED, note="SM12x, if asked for"
    )
    return kit.found(
        edits,
        now=f"{_PATH}: {_CLASS} is for 10.x alone",
        done=f"{_PATH}: {_CLASS} is for SM12x too, if it is asked for",
    )


def prove(case: kit.Case) -> str:
    """Check what is taken unasked and asked for, with a FlashInfer that has it and an older one."""
    sm10x = (100, 103)
    sm12x = (120, 121)
    unasked = kit.Decision("NVFP4 linear", kit.nvfp4_linear, None, ())
    older = kit.Decision("with an older FlashInfer", partial(_choose, sm10x), None, ())
    choose = partial(_choose, sm10x + sm12x)
    asked = kit.Decision("NVFP4 linear, asked for", choose, _CLASS, kit.SM12X)
    *_same, change = kit.prove_decisions(case, [unasked, older, asked])
    return f"{change}; unchanged unasked, and with an older FlashInfer"


def _choose(devices: tuple[int, ...], code: kit.Code) -> str:
    library = SimpleNamespace(
        is_backend_supported=lambda _backend, device: device in devices
    )
    code.names = {**code.names, "mm_fp4": library}
    code.names[
        "get_current_vllm_config"
    ]().kernel_config.linear_backend = "flashinfer_cutedsl"
    return kit.nvfp4_linear(code)


_EXAMPLE = f"class {_CLASS}:\n    def is_supported():\n        return "
FIX = kit.Fix(
    title="FlashInfer's CuTe-DSL NVFP4 GEMM on SM12x, by --linear-backend",
    symptom="--linear-backend flashinfer_cutedsl gives a kernel with 16-bit activations on a GB10.",
    why="The gate is for 10.x alone. The FlashInfer that 0.33.0 pins has the kernel for SM12x: the "
    "gate asks it now. The automatic choice stays CUTLASS.",
    needs=(kit.optional(">=0.33", "about as fast as CUTLASS with autotune"),),
    upstream="never: the gate is the same from 0.25.0 to 0.33.0",
    look=look,
    prove=prove,
    examples=(
        kit.Example(
            "0.33.0",
            _PATH,
            f"{_EXAMPLE}{_BEFORE}\n",
            f"{_ASKED}\n\n{_EXAMPLE}{_AFTER}\n",
        ),
    ),
)
