"""NVFP4 experts of checkpoints with 16-bit activations on b12x, where it is installed."""

from functools import partial
from types import SimpleNamespace

from patchkit.recipes.vllm import kit

_EXPERTS = "vllm/model_executor/layers/fused_moe/b12x.py"
_SCOPE = "select_nvfp4_moe_backend"
_BEFORE = "        NvFp4MoeBackend.MARLIN,\n        NvFp4MoeBackend.HUMMING,\n"
_AFTER = f"        NvFp4MoeBackend.B12X,\n{_BEFORE}"


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read the order of the backends, in which b12x has no place."""
    text = tree.read(kit.NVFP4_MOE)
    edits = kit.swap_text(
        kit.NVFP4_MOE, text, _BEFORE, _AFTER, note="b12x before Marlin"
    )
    now = f"{kit.NVFP4_MOE}: b12x is taken only by --moe-backend"
    return kit.found(
        edits, now=now, done=f"{kit.NVFP4_MOE}: b12x is tried before Marlin"
    )


def prove(case: kit.Case) -> str:
    """Check that b12x, if installed, is taken in Marlin's place on SM12x, and nowhere else."""
    changed = kit.SM12X[:1] if "nvfp4_moe_marlin" in case.active else kit.SM12X
    asked = kit.Decision("with b12x", partial(_decide, True, True), "B12X", changed)
    absent = kit.Decision("without b12x", partial(_decide, False, True), None, ())
    four_bits = kit.Decision(
        "4-bit activations", partial(_decide, True, False), None, ()
    )
    kit.prove_decisions(case, [asked, absent, four_bits])
    devices = " and ".join(map(str, changed))
    return (
        f"NVFP4 MoE with 16-bit activations: b12x on {devices} if it is installed; without it, "
        "with 4-bit activations and on all others as before"
    )


def _decide(is_installed: bool, is_weight_only: bool, code: kit.Code) -> str:
    package = SimpleNamespace(is_supported=lambda: True) if is_installed else None
    code.put(_EXPERTS, "get_b12x_fused_moe", lambda: package)
    return kit.nvfp4_moe(code, is_weight_only=is_weight_only)


FIX = kit.Fix(
    title="NVFP4 experts with 16-bit activations take b12x before Marlin",
    symptom="nvidia/Qwen3.6-35B-A3B-NVFP4 lands on Marlin although vllm[b12x] is installed.",
    why="b12x has kernels for SM12x, and vLLM asks it what it supports, but only if --moe-backend "
    "names it. Without b12x, with expert parallelism or 4-bit activations nothing changes.",
    needs=(kit.optional(">=0.29", "upstream's GB10 recipes take Marlin"),),
    upstream="vllm#54669 (open); --moe-backend b12x from 0.29.0 on",
    look=look,
    prove=prove,
    examples=(
        kit.Example(
            "0.33.0",
            kit.NVFP4_MOE,
            f"def {_SCOPE}():\n    AVAILABLE_BACKENDS = [\n{_BEFORE}    ]\n",
            f"def {_SCOPE}():\n    AVAILABLE_BACKENDS = [\n{_AFTER}    ]\n",
        ),
    ),
)
