"""NVFP4 linear layers on Marlin: 4-bit weights, 16-bit activations."""

from functools import partial
from textwrap import indent

from patchkit.recipes.vllm import kit

# Path, scope, what stands there, what replaces it, and the function that this calls.
_Form = tuple[str, str, str, str, str]

_QUANTIZATION = "vllm/model_executor/layers/quantization"
_NOTE = "Marlin on 12.1"

# From 0.20 on: a list of kernels in order of preference.
_INIT = "init_nvfp4_linear_kernel"
_BEFORE = "_POSSIBLE_NVFP4_KERNELS"
_AFTER = "_marlin_first_on_gb10(_POSSIBLE_NVFP4_KERNELS)"
_FIRST = '''\
def _marlin_first_on_gb10(kernels):
    """The kernels by platform; on capability 12.1, Marlin's first."""
    if not (
        current_platform.is_cuda() and current_platform.is_device_capability((12, 1))
    ):
        return kernels
    logger.info_once(
        "patchkit: NVFP4 linear layers prefer Marlin on 12.1, where FP4 GEMMs were "
        "reported wrong (nvfp4_linear_marlin)"
    )
    platform = current_platform._enum
    ordered = sorted(
        kernels[platform], key=lambda kernel: kernel is not MarlinNvFp4LinearKernel
    )
    return {**kernels, platform: ordered}
'''

# Before: a chain of conditions, in 0.16-0.19 for all checkpoints, earlier in two places.
_ASKED = '''\
def _marlin_on_gb10() -> bool:
    """Whether NVFP4 linear layers take Marlin: on 12.1, unless a backend is named."""
    from vllm.platforms import current_platform

    if envs.VLLM_NVFP4_GEMM_BACKEND is not None or not (
        current_platform.is_cuda() and current_platform.is_device_capability((12, 1))
    ):
        return False
    logger.info_once(
        "patchkit: NVFP4 linear layers take Marlin on 12.1, where FP4 GEMMs were "
        "reported wrong (nvfp4_linear_marlin)"
    )
    return True
'''


_SELECT = (
    f"{_QUANTIZATION}/utils/nvfp4_utils.py",
    "select_nvfp4_linear_backend",
    """\
if current_platform.has_device_capability(100) and has_flashinfer():
    backend = NvFp4LinearBackend.FLASHINFER_CUTLASS
elif cutlass_fp4_supported():
    backend = NvFp4LinearBackend.VLLM_CUTLASS
elif is_fp4_marlin_supported():
    backend = NvFp4LinearBackend.MARLIN
""",
    """\
if is_fp4_marlin_supported() and _marlin_on_gb10():
    backend = NvFp4LinearBackend.MARLIN
elif current_platform.has_device_capability(100) and has_flashinfer():
    backend = NvFp4LinearBackend.FLASHINFER_CUTLASS
elif cutlass_fp4_supported():
    backend = NvFp4LinearBackend.VLLM_CUTLASS
elif is_fp4_marlin_supported():
    backend = NvFp4LinearBackend.MARLIN
""",
    _ASKED,
)
_MODELOPT = (
    f"{_QUANTIZATION}/modelopt.py",
    "ModelOptNvFp4LinearMethod.__init__",
    """\
if has_flashinfer():
    self.backend = "flashinfer-cutlass"
elif cutlass_fp4_supported():
    self.backend = "cutlass"
elif is_fp4_marlin_supported():
    self.backend = "marlin"
""",
    """\
if is_fp4_marlin_supported() and _marlin_on_gb10():
    self.backend = "marlin"
elif has_flashinfer():
    self.backend = "flashinfer-cutlass"
elif cutlass_fp4_supported():
    self.backend = "cutlass"
elif is_fp4_marlin_supported():
    self.backend = "marlin"
""",
    _ASKED,
)
_COMPRESSED = (
    f"{_QUANTIZATION}/compressed_tensors/compressed_tensors.py",
    "CompressedTensorsConfig._get_scheme_from_parts",
    "cutlass_fp4_supported() or envs.VLLM_USE_NVFP4_CT_EMULATIONS",
    """(
    cutlass_fp4_supported() and not _marlin_on_gb10()
) or envs.VLLM_USE_NVFP4_CT_EMULATIONS""",
    _ASKED,
)


# What it is called where the choice is made.
_MARLIN = {
    kit.REGISTRIES[0]: "MarlinNvFp4LinearKernel",
    _SELECT[0]: "MARLIN",
    _MODELOPT[0]: "marlin",
}


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read a list of kernels; to 0.19 a chain of conditions, to 0.14 one per checkpoint format."""
    forms = _forms(tree)
    edits = kit.together(
        *(
            partial(kit.wrap, path, tree.read(path), *form, note=_NOTE)
            for path, *form in forms
        )
    )
    paths = kit.places(sorted({edit.path for edit in edits})) or forms[0][0]
    return kit.found(
        edits,
        now=f"{paths}: NVFP4 linear layers prefer CUTLASS on 12.1",
        done=f"{paths}: NVFP4 linear layers prefer Marlin on 12.1",
    )


def _forms(tree: kit.SourceTree) -> list[_Form]:
    if tree.exists(kit.REGISTRIES[0]) and _INIT in tree.read(kit.REGISTRIES[0]):
        return [(kit.REGISTRIES[0], _INIT, _BEFORE, _AFTER, _FIRST)]
    return [_SELECT] if tree.exists(_SELECT[0]) else [_MODELOPT, _COMPRESSED]


def prove(case: kit.Case) -> str:
    """Check that 12.1 takes Marlin, and all others what they took before."""
    place = _forms(case.stock)[0][0]
    decisions = [kit.Decision("NVFP4 linear", kit.nvfp4_linear, wanted=_MARLIN[place])]
    if place == _MODELOPT[0]:
        what = "NVFP4 linear of compressed-tensors"
        decisions.append(
            kit.Decision(what, kit.nvfp4_scheme, wanted="CompressedTensorsW4A16Fp4")
        )
    return "; ".join(kit.prove_decisions(case, decisions))


FIX = kit.Fix(
    title="NVFP4 linear layers take Marlin on 12.1",
    symptom="Garbage, an illegal instruction or a CUTLASS error from an NVFP4 model.",
    why="FlashInfer's and vLLM's FP4 GEMMs come first on everything from 10.0 on. On SM12x they "
    "were reported to give wrong numbers, depending on model and version, without any message. "
    "Marlin keeps the 4-bit weights and computes in 16 bits; decoding is bound by memory, so it "
    "costs little there and some speed in prefill.",
    needs=(
        kit.recommended(
            ">=0.11.1,<0.28", "the FP4 GEMMs were reported wrong on 12.x", target="gb10"
        ),
        kit.optional(
            ">=0.28", "upstream's GB10 recipes use the native FP4 GEMMs", target="gb10"
        ),
    ),
    upstream="never the default; VLLM_NVFP4_GEMM_BACKEND=marlin in 0.16-0.23, --linear-backend "
    "marlin from 0.22.0",
    look=look,
    prove=prove,
    examples=(
        kit.Example(
            "0.25.1",
            kit.REGISTRIES[0],
            f"def {_INIT}():\n    return {_BEFORE}\n",
            f"{_FIRST}\n\ndef {_INIT}():\n    return {_AFTER}\n",
        ),
        kit.Example(
            "0.19.1",
            _SELECT[0],
            f"def {_SELECT[1]}():\n{indent(_SELECT[2], '    ')}",
            f"{_ASKED}\n\ndef {_SELECT[1]}():\n{indent(_SELECT[3], '    ')}",
        ),
    ),
)
