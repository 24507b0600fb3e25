"""Fixes that nobody gets without asking apply and know themselves; proofs notice what is broken."""

from dataclasses import replace

import pytest
from packaging.version import Version

from patchkit.apply import plan_for
from patchkit.errors import ProofError
from patchkit.patching.fix import Case, Severity, State
from patchkit.patching.plan import make_plan
from patchkit.patching.workspace import open_workspace
from patchkit.proof.prove import prove
from patchkit.recipes.vllm.attention import FA2, FA3, INTERFACE
from support.selection import RELEASES

pytestmark = pytest.mark.releases


@pytest.fixture
def planned(release, recipe, ask):
    """A plan of an untouched release: ``planned("0.24.0", "native", also={"x"})``."""

    def make(version, arch="native", **selection):
        return plan_for(
            open_workspace(release(version), "vllm"), recipe, ask(arch, **selection)
        )

    return make


def states(plan, wanted):
    return {
        verdict.fix.id: verdict.state
        for verdict in plan.verdicts
        if verdict.fix.id in wanted
    }


@pytest.mark.parametrize(
    "version",
    [
        RELEASES[0],
        *(pytest.param(later, marks=pytest.mark.e2e) for later in RELEASES[1:]),
    ],
)
def test_optional_fixes_apply_and_know_themselves(version, planned, recipe):
    arch = "native"  # no optional fix looks at the mode
    wanted = {
        fix.id
        for fix in recipe.fixes
        if (need := fix.need(Version(version), arch))
        if need.severity is Severity.OPTIONAL
    }
    assert "moe_configs" in wanted
    assert states(planned(version, arch), wanted) == dict.fromkeys(wanted, State.OFF)

    plan = planned(version, arch, also=wanted)
    prove(plan)
    again = make_plan(plan.patched, recipe, plan.request)

    assert states(plan, wanted) == dict.fromkeys(wanted, State.APPLY)
    assert states(again, wanted) == dict.fromkeys(wanted, State.APPLIED)


@pytest.mark.parametrize(
    ("fix_id", "version", "path", "promised", "broken"),
    [
        ("shm_spin", "0.27.1", "vllm/envs.py", '"0.002"', '"0.2"'),
        (
            "fastsafetensors_rank",
            "0.14.1",
            "vllm/model_executor/model_loader/weight_utils.py",
            "sorted(hf_weights_files, key=os.path.basename)",
            "hf_weights_files",
        ),
    ],
)
def test_proofs_notice_what_was_promised_and_is_not_there(
    fix_id, version, path, promised, broken, planned
):
    plan = planned(version, also={fix_id})
    fix = next(v.fix for v in plan.verdicts if v.fix.id == fix_id)
    text = plan.patched.read(path)
    assert text.count(promised) == 1
    other = plan.patched.with_texts({path: text.replace(promised, broken)})

    case = Case(
        stock=plan.stock,
        patched=plan.patched,
        request=plan.request,
        active=frozenset({fix_id}),
    )
    assert fix.prove(case)
    with pytest.raises(ProofError):
        fix.prove(replace(case, patched=other))


def test_flashattention_3_is_not_left_out_where_a_gb10_would_use_it(planned):
    plan = planned("0.27.1", only={"fa3_hopper"})
    (verdict,) = (v for v in plan.verdicts if v.fix.id == "fa3_hopper")
    case = Case(
        stock=plan.stock, patched=plan.patched, request=plan.request, active=frozenset()
    )
    assert verdict.state is State.APPLY
    assert verdict.fix.prove(case)

    path = "vllm/v1/attention/backends/fa_utils.py"
    text = plan.stock.read(path).replace(
        "capability.major == 9 and", "capability.major >= 9 and"
    )
    guards = plan.stock.read(INTERFACE).replace(
        "is_device_capability_family(90)", "has_device_capability(90)"
    )
    using = plan.patched.with_texts({path: text, INTERFACE: guards})
    with pytest.raises(ProofError, match="attention on NVIDIA DGX Spark"):
        verdict.fix.prove(replace(case, patched=using))

    cmake = "cmake/external_projects/vllm_flash_attn.cmake"
    alone = plan.stock.read(cmake).replace(
        f"_FA_COMPONENT {FA2} {FA3}", f"_FA_COMPONENT {FA3}"
    )
    with pytest.raises(ProofError, match=f"is not with {FA2}"):
        verdict.fix.prove(
            replace(case, patched=plan.patched.with_texts({cmake: alone}))
        )
