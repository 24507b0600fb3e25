"""FlashAttention 3 is left out where no device can run it, and vLLM decides as if it were there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from patchkit.apply import plan_for
from patchkit.errors import ProofError
from patchkit.patching.fix import Case, State
from patchkit.patching.workspace import open_workspace
from patchkit.proof import upstream_code
from patchkit.recipes.vllm.attention import FA2, FA3, INTERFACE

pytestmark = pytest.mark.releases


@pytest.fixture(scope="module", autouse=True)
def here():
    """Releases are locked by hash: their code is run in this process."""
    with upstream_code.permitted():
        yield


@pytest.fixture
def left_out(release, recipe, ask):
    """The plan that leaves it out of a release: ``left_out("0.25.1")``."""

    def planned(version, **asked):
        return plan_for(open_workspace(release(version)), recipe, ask(only={"fa3_hopper"}, **asked))

    return planned


def test_a_release_that_would_use_it_on_a_gb10_is_refused(left_out, recipe):
    plan = left_out("0.27.1")
    (verdict,) = (v for v in plan.verdicts if v.fix.id == "fa3_hopper")
    case = Case(stock=plan.stock, patched=plan.patched, request=plan.request, active=frozenset())
    assert verdict.state is State.APPLY
    assert verdict.fix.prove(case)

    path = "vllm/v1/attention/backends/fa_utils.py"
    text = plan.stock.read(path).replace("capability.major == 9 and", "capability.major >= 9 and")
    guards = plan.stock.read(INTERFACE).replace(
        "is_device_capability_family(90)", "has_device_capability(90)"
    )
    using = plan.patched.with_texts({path: text, INTERFACE: guards})
    with pytest.raises(ProofError, match="attention on NVIDIA DGX Spark"):
        verdict.fix.prove(replace(case, patched=using))

    cmake = "cmake/external_projects/vllm_flash_attn.cmake"
    alone = plan.stock.read(cmake).replace(f"_FA_COMPONENT {FA2} {FA3}", f"_FA_COMPONENT {FA3}")
    with pytest.raises(ProofError, match=f"is not with {FA2}"):
        verdict.fix.prove(replace(case, patched=plan.patched.with_texts({cmake: alone})))
