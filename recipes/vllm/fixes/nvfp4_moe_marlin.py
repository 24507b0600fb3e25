"""NVFP4 mixture-of-experts layers on Marlin: 4-bit weights, 16-bit activations."""

from textwrap import indent

from patchkit.recipes.vllm import kit

_ORACLE = "select_nvfp4_moe_backend"
_NOTE = "Marlin on 12.1"

# From 0.16 on: a list of backends in order of preference.
_FORMAT = """\
activation_format = (
    mk.FusedMoEActivationFormat.BatchedExperts
    if use_batched
    else mk.FusedMoEActivationFormat.Standard
)
"""
_FORMAT_AFTER = f"""\
AVAILABLE_BACKENDS = _marlin_first_on_gb10(AVAILABLE_BACKENDS)
{_FORMAT}"""
_FIRST = '''\
def _marlin_first_on_gb10(backends):
    """The backends in order of preference; on capability 12.1, Marlin first."""
    from vllm.platforms import current_platform

    if not (
        current_platform.is_cuda() and current_platform.is_device_capability((12, 1))
    ):
        return backends
    logger.info_once(
        "patchkit: NVFP4 MoE layers prefer Marlin on 12.1, where FP4 kernels were "
        "reported wrong (nvfp4_moe_marlin)"
    )
    return sorted(backends, key=lambda backend: backend != NvFp4MoeBackend.MARLIN)
'''

# 0.14: a chain of conditions.
_FORCED = "cutlass_fp4_supported() and not envs.VLLM_TEST_FORCE_FP8_MARLIN"
_FORCED_AFTER = (
    "cutlass_fp4_supported() and not "
    "(envs.VLLM_TEST_FORCE_FP8_MARLIN or _marlin_on_gb10())"
)
_ASKED = '''\
def _marlin_on_gb10() -> bool:
    """Whether NVFP4 MoE layers take Marlin: on 12.1, unless FlashInfer is asked for."""
    from vllm.platforms import current_platform

    if envs.VLLM_USE_FLASHINFER_MOE_FP4 or not (
        current_platform.is_cuda() and current_platform.is_device_capability((12, 1))
    ):
        return False
    logger.info_once(
        "patchkit: NVFP4 MoE layers take Marlin on 12.1, where FP4 kernels were "
        "reported wrong (nvfp4_moe_marlin)"
    )
    return True
'''

# Before: what the platform supports, which FlashInfer joins only if it is asked for.
_OLD = "vllm/model_executor/layers/quantization/utils/nvfp4_moe_support.py"
_OLD_SCOPE = "detect_nvfp4_moe_support"
_DETECTED = {
    # 0.11 has no kernel for any SM12x.
    "allow_flashinfer = cutlass_supported and is_flashinfer_fp4_cutlass_moe_available()\n": (
        "capability is not None and capability[0] == 12 and not allow_flashinfer",
        "SM12x, which has no other kernel",
    ),
    """\
allow_flashinfer = cutlass_supported and (
    is_flashinfer_fp4_cutlass_moe_available()
    or is_flashinfer_fp4_cutedsl_moe_available()
)
""": (
        "capability == (12, 1) and not allow_flashinfer",
        "12.1, where FP4 kernels were reported wrong",
    ),
}


def _detected(before: str) -> str:
    condition, devices = _DETECTED[before]
    return f"""\
{before}
from vllm.platforms import current_platform

capability = current_platform.get_device_capability()
if current_platform.is_cuda() and {condition}:
    _logger.info_once(
        "patchkit: NVFP4 MoE layers take Marlin on {devices} "
        "(nvfp4_moe_marlin)"
    )
    cutlass_supported = False
"""


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read a list of backends; in 0.14 a chain of conditions, before what the platform supports."""
    path = kit.NVFP4_MOE if tree.exists(kit.NVFP4_MOE) else _OLD
    text = tree.read(path)
    if path == _OLD:
        before = next(reversed(_DETECTED) if "cutedsl" in text else iter(_DETECTED))
        edits = kit.swap(path, text, _OLD_SCOPE, before, _detected(before), note=_NOTE)
    else:
        listed = "AVAILABLE_BACKENDS" in text
        form = (
            (_FORMAT, _FORMAT_AFTER, _FIRST)
            if listed
            else (_FORCED, _FORCED_AFTER, _ASKED)
        )
        edits = kit.wrap(path, text, _ORACLE, *form, note=_NOTE)
    return kit.found(
        edits,
        now=f"{path}: NVFP4 MoE prefers CUTLASS on 12.1",
        done=f"{path}: NVFP4 MoE prefers Marlin on 12.1",
    )


def prove(case: kit.Case) -> str:
    """Check that 12.1 (12.x where none has a kernel) takes Marlin, and others what they took."""
    all_sm12x = not case.stock.exists(
        kit.NVFP4_MOE
    ) and "cutedsl" not in case.stock.read(_OLD)
    return kit.prove_decision(
        case,
        "NVFP4 MoE",
        kit.nvfp4_moe,
        wanted="MARLIN",
        changed=kit.SM12X if all_sm12x else kit.GB10,
    )


FIX = kit.Fix(
    title="NVFP4 MoE layers take Marlin on 12.1",
    symptom="An NVFP4 MoE model stops in cutlass_fp4_moe_mm on vLLM 0.11; later, garbage or a "
    "crash from FlashInfer's fused MoE.",
    why="0.11 has no SM120 MoE kernel, but trusts a gate that speaks of dense GEMMs. Later ones "
    "prefer FlashInfer's and vLLM's CUTLASS kernels, which were reported to give wrong numbers on "
    "12.x for some models. --moe-backend and VLLM_USE_FLASHINFER_MOE_FP4 still decide if set.",
    needs=(
        kit.required(">=0.11.1,<0.12", "the chosen MoE kernel is not built"),
        kit.recommended(
            ">=0.12,<0.23",
            "native FP4 was reported wrong on 12.x; Marlin is built as machine code",
            target="gb10",
            kind="source",
        ),
        kit.optional(
            ">=0.12,<0.23",
            "upstream's wheels carry Marlin MoE as PTX, which was reported wrong on 12.x too",
            target="gb10",
            kind="installed",
        ),
        kit.recommended(
            ">=0.23,<0.28", "native FP4 was reported wrong on 12.x", target="gb10"
        ),
        kit.optional(
            ">=0.28",
            "upstream's GB10 recipes take Marlin for some models, native FP4 for others",
            target="gb10",
        ),
    ),
    upstream="0.12.0 has an SM120 NVFP4 MoE kernel; from 0.17.0 --moe-backend marlin",
    look=look,
    prove=prove,
    requires=("marlin_sass",),
    examples=(
        kit.Example(
            "0.11.2",
            _OLD,
            f"def {_OLD_SCOPE}():\n{indent(next(iter(_DETECTED)), '    ')}",
            f"def {_OLD_SCOPE}():\n{indent(_detected(next(iter(_DETECTED))), '    ')}",
        ),
        kit.Example(
            "0.25.1",
            kit.NVFP4_MOE,
            f"AVAILABLE_BACKENDS = []\n\n\ndef {_ORACLE}():\n{indent(_FORMAT, '    ')}",
            f"AVAILABLE_BACKENDS = []\n\n\n{_FIRST}\n\ndef {_ORACLE}():\n"
            f"{indent(_FORMAT_AFTER, '    ')}",
        ),
    ),
)
