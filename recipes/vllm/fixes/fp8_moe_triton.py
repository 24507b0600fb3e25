"""FP8 mixture-of-experts layers on Triton."""

from functools import partial
from textwrap import indent

from patchkit.recipes.vllm import kit

_ORACLE = "select_fp8_moe_backend"

_SCOPE = "_get_priority_backends"
_BEFORE = "return _AVAILABLE_BACKENDS\n"
_AFTER = """\
if current_platform.is_cuda() and current_platform.is_device_capability((12, 1)):
    logger.info_once(
        "patchkit: FP8 MoE layers prefer Triton on 12.1 to FlashInfer (fp8_moe_triton)"
    )
    _move_to_front(_AVAILABLE_BACKENDS, Fp8MoeBackend.BATCHED_TRITON)
    _move_to_front(_AVAILABLE_BACKENDS, Fp8MoeBackend.TRITON)

return _AVAILABLE_BACKENDS
"""

# 0.16 keeps the list in the oracle itself.
_FORMAT = """\
activation_format = (
    mk.FusedMoEActivationFormat.BatchedExperts
    if config.moe_parallel_config.use_batched_activation_format
    else mk.FusedMoEActivationFormat.Standard
)
"""
_FORMAT_AFTER = f"""\
if current_platform.is_cuda() and current_platform.is_device_capability((12, 1)):
    logger.info_once(
        "patchkit: FP8 MoE layers prefer Triton on 12.1 to FlashInfer (fp8_moe_triton)"
    )
    for triton in (Fp8MoeBackend.BATCHED_TRITON, Fp8MoeBackend.TRITON):
        AVAILABLE_BACKENDS.remove(triton)
        AVAILABLE_BACKENDS.insert(0, triton)

{_FORMAT}"""


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read a list of backends in order of preference; before it came, Triton was the only one."""
    text = tree.read(kit.FP8_MOE)
    if "AVAILABLE_BACKENDS" not in text:
        raise kit.absent(f"{kit.FP8_MOE}: no list of backends in order of preference")
    listed = f"def {_SCOPE}(" in text
    form = (_SCOPE, _BEFORE, _AFTER) if listed else (_ORACLE, _FORMAT, _FORMAT_AFTER)
    return kit.found(
        kit.swap(kit.FP8_MOE, text, *form, note="Triton on 12.1"),
        now=f"{kit.FP8_MOE}: per-tensor FP8 MoE prefers FlashInfer on 12.1",
        done=f"{kit.FP8_MOE}: FP8 MoE prefers Triton on 12.1",
    )


def prove(case: kit.Case) -> str:
    """Check that 12.1 takes Triton for every kind of scale, and all others what they took."""
    what = f"FP8 MoE, one scale per {', '.join(kit.SCALES)}"
    decisions = [
        kit.Decision(what, partial(kit.fp8_moe, scales=scales), wanted="TRITON")
        for scales in kit.SCALES
    ]
    return kit.prove_decisions(case, decisions)[0]


FIX = kit.Fix(
    id="fp8_moe_triton",
    title="FP8 MoE layers take Triton on 12.1",
    symptom="An FP8 MoE model with one scale per tensor stops in FlashInfer's fused MoE, or a "
    "tuned Triton configuration for the GB10 is never loaded.",
    why="From 0.16 on a list decides, and FlashInfer's CUTLASS MoE, which accepts 12.x for static "
    "per-tensor scales, stands before Triton. Tuned configurations only speak to Triton.",
    needs=(
        kit.Need(
            ">=0.16",
            kit.Severity.OPTIONAL,
            "FlashInfer comes first for static per-tensor scales; block scales take Triton anyway",
        ),
    ),
    upstream="Triton was the only choice up to 0.14; from 0.17.0 --moe-backend triton asks for it",
    evidence=(
        kit.Evidence(
            "Triton runs, and answers within FP8's tolerance of what stock takes",
            "an H200 that reports 12.1, vLLM 0.25.1: docs/gpu.md",
            "measured",
        ),
        kit.Evidence(
            "what each release takes on 12.1, by its own code with the capability given",
            "patchkit's proof of this fix",
            "measured",
        ),
        kit.Evidence("Triton by default on SM12x", "vllm#43507", "reported"),
        kit.Evidence(
            "a tuned configuration is worth 65.7 %", "one Spark user, for 512 experts", "reported"
        ),
        kit.Evidence(
            "a tuned configuration is worth 3.5 % in the kernel and nothing end to end",
            "vllm#52192, another model",
            "reported",
        ),
    ),
    look=look,
    prove=prove,
    examples=(
        kit.Example(
            version="0.25.1",
            path=kit.FP8_MOE,
            before=f"def {_SCOPE}():\n    {_BEFORE}",
            after=f"def {_SCOPE}():\n{indent(_AFTER, '    ')}",
        ),
        kit.Example(
            version="0.16.0",
            path=kit.FP8_MOE,
            before=f"AVAILABLE_BACKENDS = []\n\n\ndef {_ORACLE}():\n{indent(_FORMAT, '    ')}",
            after=f"AVAILABLE_BACKENDS = []\n\n\ndef {_ORACLE}():\n{indent(_FORMAT_AFTER, '    ')}",
        ),
    ),
)
