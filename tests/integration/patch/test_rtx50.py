"""The device rtx50 in five releases: what is planned, and what the release's own CMake builds."""

import pytest

from patchkit.apply import plan_for
from patchkit.patching.fix import State
from patchkit.patching.workspace import open_workspace
from patchkit.proof.prove import prove

pytestmark = pytest.mark.releases
ALWAYS = {"fa3_hopper", "shm_spin", "int8_azp", "ptx_only", "version_label"}
# Fixes whose edits change what a GB10 does, and nothing on 12.0.
OF_GB10 = {
    *("deepgemm_sm12x", "fp8_block_triton", "fp8_linear_torch", "moe_configs"),
    *("nvfp4_linear_marlin", "nvfp4_moe_marlin"),
}


@pytest.mark.parametrize(
    ("version", "needed", "native", "family"),
    [
        ("0.23.0", {"fp8_grouped_gemm"}, "19 of 38", "17 of 38"),
        ("0.25.1", set(), "21 of 35", "19 of 35"),
        ("0.28.0", set(), "24 of 39", "22 of 39"),
        ("0.31.0", set(), "23 of 38", "21 of 38"),
        ("0.33.0", set(), "24 of 40", "22 of 40"),
    ],
)
def test_what_a_build_for_it_gets(
    version, needed, native, family, release, recipe, ask
):
    for arch, code, groups in (
        ("native", "12.0a", native),
        ("family", "12.0f", family),
    ):
        workspace = open_workspace(release(version), "vllm")
        plan = plan_for(workspace, recipe, ask(arch, target="rtx50"))
        states = {verdict.fix.id: verdict.state for verdict in plan.verdicts}
        applied = {name for name, state in states.items() if state is State.APPLY}
        lists = {"arch_lists", "marlin_sass"} if arch == "native" else set()
        assert applied == ALWAYS | needed | lists
        out = {name for name in OF_GB10 if states[name] is State.NOT_APPLICABLE}
        assert out == OF_GB10
        told = prove(plan)
        assert any(
            f"{groups} kernel groups are built for {code}" in text for text in told
        )
