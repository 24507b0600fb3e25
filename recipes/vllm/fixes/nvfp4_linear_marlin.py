"""NVFP4 linear layers on Marlin: 4-bit weights, 16-bit activations."""

from functools import partial
from textwrap import indent
from typing import Any

from patchkit.recipes.vllm import kit

_Place = tuple[
    Any, ...
]  # path, scope, and forms: what stands there, and what replaces it

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


def _chain(condition: str, target: str, *backends: str) -> tuple[str, str]:
    """Return the chain of conditions as upstream has it, and with Marlin in front."""
    flashinfer, cutlass, marlin = (
        f"    {target} = {backend}\n" for backend in backends
    )
    before = (
        f"if {condition}:\n{flashinfer}elif cutlass_fp4_supported():\n{cutlass}"
        f"elif is_fp4_marlin_supported():\n{marlin}"
    )
    return (
        before,
        f"if is_fp4_marlin_supported() and _marlin_on_gb10():\n{marlin}el{before}",
    )


# Of each place, the form of releases first, then those of commits between two releases.
_BLACKWELL = "current_platform.has_device_capability(100) and has_flashinfer()"
_COMPILED = (
    "(\n    cutlass_fp4_supported()\n    and "
    + _BLACKWELL.replace(" and", "\n    and")
    + "\n)"
)
_ENUM = [
    f"NvFp4LinearBackend.{name}"
    for name in ("FLASHINFER_CUTLASS", "VLLM_CUTLASS", "MARLIN")
]
_NAMES = ['"flashinfer-cutlass"', '"cutlass"', '"marlin"']
_LOOP = """\
for backend in {backends}:
    supported, reason = is_backend_supported(backend)
    if supported:
        selected_backend = backend
        break
"""
_ORDERED = """\
sorted(
    NVFP4_LINEAR_BACKENDS,
    key=lambda each: _marlin_on_gb10() and each is not NvFp4LinearBackend.MARLIN,
)"""
_SELECT = (
    f"{_QUANTIZATION}/utils/nvfp4_utils.py",
    "select_nvfp4_linear_backend",
    _chain(_BLACKWELL, "backend", *_ENUM),
    _chain(_COMPILED, "backend", *_ENUM),
    (_LOOP.format(backends="NVFP4_LINEAR_BACKENDS"), _LOOP.format(backends=_ORDERED)),
)
_MODELOPT = (
    f"{_QUANTIZATION}/modelopt.py",
    "ModelOptNvFp4LinearMethod.__init__",
    _chain("has_flashinfer()", "self.backend", *_NAMES),
    _chain(_BLACKWELL, "self.backend", *_NAMES),
)
_COMPRESSED = (
    f"{_QUANTIZATION}/compressed_tensors/compressed_tensors.py",
    "CompressedTensorsConfig._get_scheme_from_parts",
    (
        "cutlass_fp4_supported() or envs.VLLM_USE_NVFP4_CT_EMULATIONS",
        """(
    cutlass_fp4_supported() and not _marlin_on_gb10()
) or envs.VLLM_USE_NVFP4_CT_EMULATIONS""",
    ),
)


# What it is called where the choice is made.
_MARLIN = {
    kit.REGISTRIES[0]: "MarlinNvFp4LinearKernel",
    _SELECT[0]: "MARLIN",
    _MODELOPT[0]: "marlin",
}


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read a list of kernels; to 0.19 a chain of conditions, to 0.14 one per checkpoint format."""
    using, places = _places(tree)
    edits = kit.together(*(partial(_wrapped, tree, using, *place) for place in places))
    paths = kit.places(sorted({edit.path for edit in edits})) or places[0][0]
    return kit.found(
        edits,
        now=f"{paths}: NVFP4 linear layers prefer CUTLASS on 12.1",
        done=f"{paths}: NVFP4 linear layers prefer Marlin on 12.1",
    )


def _places(tree: kit.SourceTree) -> tuple[str, list[_Place]]:
    """Return the function to add, and where it is to be asked."""
    if tree.exists(kit.REGISTRIES[0]) and _INIT in tree.read(kit.REGISTRIES[0]):
        return _FIRST, [(kit.REGISTRIES[0], _INIT, (_BEFORE, _AFTER))]
    return _ASKED, [_SELECT] if tree.exists(_SELECT[0]) else [_MODELOPT, _COMPRESSED]


def _wrapped(
    tree: kit.SourceTree, using: str, path: str, scope: str, *forms: tuple[str, str]
) -> kit.Edits:
    """Return the edits in the form that the code has. Raises DriftError about the first form."""
    trouble = None
    for form in forms:
        try:
            return kit.wrap(path, tree.read(path), scope, *form, using, note=_NOTE)
        except kit.DriftError as error:
            trouble = trouble or error
    assert trouble is not None
    raise trouble


def prove(case: kit.Case) -> str:
    """Check that 12.1 takes Marlin, and all others what they took before."""
    place = _places(case.stock)[1][0][0]
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
            f"def {_SELECT[1]}():\n{indent(_SELECT[2][0], '    ')}",
            f"{_ASKED}\n\ndef {_SELECT[1]}():\n{indent(_SELECT[2][1], '    ')}",
        ),
    ),
)
