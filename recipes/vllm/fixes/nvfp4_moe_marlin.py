"""NVFP4 mixture-of-experts layers on Marlin: 4-bit weights, 16-bit activations."""

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
