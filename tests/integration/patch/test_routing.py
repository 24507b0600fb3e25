"""What a user asks for still decides where quantised layers go, after every routing fix.

Nothing is asked of a GPU: the release's platform class is told a capability, see
``patchkit.recipes.vllm.decisions``.
"""

import pytest

from patchkit.apply import plan_for
from patchkit.patching.workspace import open_workspace
from patchkit.recipes.vllm.decisions import (
    NVFP4_MOE,
    REGISTRIES,
    fp8_linear,
    nvfp4_linear,
    nvfp4_moe,
    on_device,
)
from patchkit.recipes.vllm.routing import Capability, outcome
from support.fp8_moe import FP8_MOE, fp8_moe

pytestmark = [pytest.mark.releases, pytest.mark.usefixtures("run_here")]

ROUTING = {
    "deepgemm_sm12x",
    "fp8_block_triton",
    "fp8_grouped_gemm",
    "fp8_linear_torch",
    "mxfp4_moe_marlin",
    "nvfp4_linear_marlin",
    "nvfp4_moe_marlin",
}
LAYERS = {
    "FP8 linear per token": lambda code: fp8_linear(code, "token"),
    "FP8 linear per block": lambda code: fp8_linear(code, "block"),
    "FP8 MoE per block": lambda code: fp8_moe(code, "block"),
    "NVFP4 linear": nvfp4_linear,
    "NVFP4 MoE": nvfp4_moe,
}
# How each layer ends on 12.1, in the words of all releases.
WANTED = {
    "FP8 linear per token": {"torch", "ChannelWiseTorchFP8ScaledMMLinearKernel"},
    "FP8 linear per block": {"_run_triton", "TritonFp8BlockScaledMMKernel"},
    "FP8 MoE per block": {"TRITON"},
    "NVFP4 linear": {"marlin", "MARLIN", "MarlinNvFp4LinearKernel"},
    "NVFP4 MoE": {"MARLIN"},
}
GB10 = Capability(12, 1)


@pytest.fixture(scope="module")
def routed(release, recipe, ask, version):
    """The tree of a release before and after all routing fixes, wanted or not."""
    request = ask(only=ROUTING, also={"marlin_sass"})
    plan = plan_for(open_workspace(release(version), "vllm"), recipe, request)
    assert not plan.drifted
    return plan.stock, plan.patched


def decided(layer, tree, capability, environ=None, **flags):
    return outcome(
        lambda tree, capability: LAYERS[layer](
            on_device(tree, capability, environ, **flags)
        ),
        tree,
        capability,
    )


@pytest.mark.parametrize(
    ("layer", "environ", "flags"),
    [
        ("FP8 linear per token", {}, {"linear_backend": "cutlass"}),
        ("FP8 linear per block", {}, {"linear_backend": "cutlass"}),
        (
            "FP8 linear per block",
            {"VLLM_USE_DEEP_GEMM": "1"},
            {"linear_backend": "deep_gemm"},
        ),
        (
            "FP8 MoE per block",
            {"VLLM_USE_DEEP_GEMM": "1", "VLLM_MOE_USE_DEEP_GEMM": "1"},
            {},
        ),
        ("NVFP4 linear", {"VLLM_NVFP4_GEMM_BACKEND": "cutlass"}, {}),
        ("NVFP4 linear", {}, {"linear_backend": "flashinfer_cutlass"}),
        ("NVFP4 MoE", {}, {"moe_backend": "flashinfer_cutlass"}),
        ("NVFP4 MoE", {"VLLM_USE_FLASHINFER_MOE_FP4": "1"}, {}),
    ],
)
@pytest.mark.filterwarnings(
    "ignore:VLLM_:FutureWarning"
)  # upstream announces the end of some
def test_what_the_user_asks_for_still_decides(layer, environ, flags, routed):
    """Where a release knows a variable or a flag, it gives what it gave without patchkit."""
    stock, patched = routed
    if not _knows(stock, layer, environ, flags):
        assert decided(layer, patched, GB10, environ, **flags) in WANTED[layer]
    elif str(stock.version) == "0.24.0" and "VLLM_USE_DEEP_GEMM" in environ:
        # It would stop in DeepGEMM; saying so at the start is better.
        assert str(decided(layer, patched, GB10, environ, **flags)).startswith(
            "ValueError"
        )
    else:
        before = decided(layer, stock, GB10, environ, **flags)
        assert decided(layer, patched, GB10, environ, **flags) == before


def _knows(tree, layer, environ, flags):
    """Whether a release reads these for this layer; 0.11-0.14's oracles know fewer of them."""
    variables = tree.read("vllm/envs.py")
    place = {"linear": REGISTRIES[0], "FP8 MoE": FP8_MOE, "NVFP4 MoE": NVFP4_MOE}
    path = next(path for name, path in place.items() if name in layer)
    text = tree.read(path) if tree.exists(path) else ""
    flag = {"linear_backend": "_get_linear_backend", "moe_backend": "runner_backend"}
    return all(f'"{name}"' in variables for name in environ) and all(
        flag[name] in text for name in flags
    )
