"""The device rtx50 in five releases: what is planned, and what the release's own CMake builds."""

import pytest

from patchkit.apply import plan_for
from patchkit.patching.fix import State
from patchkit.patching.workspace import open_workspace
from patchkit.proof.prove import prove

pytestmark = pytest.mark.releases
ALWAYS = {"fa3_hopper", "shm_spin", "int8_azp", "ptx_only", "version_label"}
NATIVE = {"arch_lists", "marlin_sass"}
GROUPED = {"fp8_grouped_gemm"}
# Fixes whose edits change what a GB10 does, and nothing on 12.0.
OF_GB10 = {
    *("deepgemm_sm12x", "fp8_block_triton", "fp8_linear_torch", "moe_configs"),
    *("nvfp4_linear_marlin", "nvfp4_moe_marlin"),
}


@pytest.mark.parametrize(
    ("version", "arch", "also", "groups"),
    [
        # Some of upstream's own lists name 12.0a here.
        (
            "0.18.1",
            "native",
            NATIVE | GROUPED,
            "16 of 34 kernel groups are built for 12.0a",
        ),
        (
            "0.23.0",
            "native",
            NATIVE | GROUPED,
            "19 of 38 kernel groups are built for 12.0a",
        ),
        ("0.25.1", "native", NATIVE, "21 of 35 kernel groups are built for 12.0a"),
        ("0.28.0", "native", NATIVE, "24 of 39 kernel groups are built for 12.0a"),
        ("0.31.0", "native", NATIVE, "23 of 38 kernel groups are built for 12.0a"),
        ("0.33.0", "native", NATIVE, "24 of 40 kernel groups are built for 12.0a"),
        ("0.23.0", "family", GROUPED, "17 of 38 kernel groups are built for 12.0f"),
        ("0.25.1", "family", set(), "19 of 35 kernel groups are built for 12.0f"),
        ("0.28.0", "family", set(), "22 of 39 kernel groups are built for 12.0f"),
        ("0.31.0", "family", set(), "21 of 38 kernel groups are built for 12.0f"),
        ("0.33.0", "family", set(), "22 of 40 kernel groups are built for 12.0f"),
    ],
)
def test_what_a_build_for_it_gets(version, arch, also, groups, release, recipe, ask):
    workspace = open_workspace(release(version), "vllm")
    plan = plan_for(workspace, recipe, ask(arch, target="rtx50"))
    states = {verdict.fix.id: verdict.state for verdict in plan.verdicts}
    applied = {name for name, state in states.items() if state is State.APPLY}
    assert applied == ALWAYS | also
    assert {states[name] for name in OF_GB10} == {State.NOT_APPLICABLE}
    assert any(groups in sentence for sentence in prove(plan))
