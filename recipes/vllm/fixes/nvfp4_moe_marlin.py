"""NVFP4 MoE on SM12x before a kernel for it existed."""

from __future__ import annotations

import builtins
from types import SimpleNamespace

from patchkit.edit.python import swap
from patchkit.patching.fix import (
    Evidence,
    Example,
    Finding,
    Fix,
    Need,
    Request,
    Severity,
    found,
    upstream,
)
from patchkit.proof.routing import Capability, Platform, function, prove_routing
from patchkit.proof.running import Anything
from patchkit.source.tree import SourceTree

_PATH = "vllm/model_executor/layers/quantization/utils/nvfp4_moe_support.py"
_SCOPE = "detect_nvfp4_moe_support"
_KERNEL = "csrc/**/nvfp4_blockwise_moe_kernel.cu"

_BEFORE = "allow_flashinfer = cutlass_supported and is_flashinfer_fp4_cutlass_moe_available()"
_AFTER = """\
allow_flashinfer = cutlass_supported and is_flashinfer_fp4_cutlass_moe_available()

# The CUTLASS MoE kernel of this release is for SM100; without FlashInfer, SM12x takes Marlin.
from vllm.platforms import current_platform

capability = current_platform.get_device_capability()
if capability is not None and capability[0] == 12 and not allow_flashinfer:
    cutlass_supported = False
"""


def look(tree: SourceTree, request: Request) -> Finding:
    """The MoE kernel's own sources tell whether SM12x has one."""
    kernels = tree.containing(_KERNEL, "sm120") if tree.kind != "installed" else []
    if kernels or not tree.exists(_PATH):
        return upstream(f"{kernels[0] if kernels else _PATH}: NVFP4 MoE runs on SM120")
    edits = swap(_PATH, tree.read(_PATH), _SCOPE, _BEFORE, _AFTER, note="Marlin on SM12x")
    return found(edits, now=f"{_PATH}: SM12x takes CUTLASS", done=f"{_PATH}: SM12x takes Marlin")


def prove(stock: SourceTree, patched: SourceTree, request: Request, active: frozenset[str]) -> str:
    """12.x must take Marlin; everybody else what they took before."""
    texts = stock.read(_PATH), patched.read(_PATH)
    return prove_routing(f"{_SCOPE}().use_marlin", _decide, *texts, wanted=True)


def _decide(text: str, capability: Capability) -> object:
    names: dict[str, object] = {
        "cutlass_fp4_supported": lambda: capability.major >= 10,
        "is_flashinfer_fp4_cutlass_moe_available": lambda: False,
        "is_fp4_marlin_supported": lambda: True,
        "envs": SimpleNamespace(VLLM_USE_FLASHINFER_MOE_FP4=False),
        "_logger": Anything(),
        "NvFp4Support": dict,
        "__builtins__": {**vars(builtins), "__import__": _importer(Platform(capability))},
    }
    return function(_PATH, text, _SCOPE, names)()["use_marlin"]


def _importer(platform: Platform) -> object:
    return lambda *_args: SimpleNamespace(current_platform=platform, annotations=None)


FIX = Fix(
    id="nvfp4_moe_marlin",
    title="NVFP4 MoE takes Marlin on SM12x",
    symptom="An NVFP4 MoE model stops in cutlass_fp4_moe_mm on vLLM 0.11.",
    why="detect_nvfp4_moe_support trusts cutlass_fp4_supported, which speaks of dense GEMMs; the "
    "SM120 MoE kernel arrived with 0.12.0.",
    needs=(Need(">=0.11.1,<0.12", Severity.REQUIRED, "the chosen MoE kernel is not built"),),
    upstream="0.12.0 has an SM120 NVFP4 MoE kernel",
    evidence=(
        Evidence("no SM120 variant in nvfp4_blockwise_moe_kernel.cu", "vLLM 0.11.2 csrc", "read"),
    ),
    look=look,
    prove=prove,
    examples=(
        Example(
            version="0.11.2",
            path=_PATH,
            before=f"def {_SCOPE}():\n    {_BEFORE}\n    return allow_flashinfer\n",
            after=f"def {_SCOPE}():\n"
            + "".join(f"    {line}\n" if line else "\n" for line in _AFTER.strip().split("\n"))
            + "    return allow_flashinfer\n",
        ),
    ),
)
