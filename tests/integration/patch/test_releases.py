"""Every release, both arch modes: apply, ask again, change one's mind, go back."""

import json
import shutil

import pytest
from packaging.version import Version

from patchkit.apply import apply, plan_for, revert
from patchkit.patching.recipe import load_support
from patchkit.patching.workspace import open_workspace
from patchkit.proof.prove import prove
from support.selection import DAILY, WHOLE, in_turns
from tools.catalogue import SupportLevel

pytestmark = pytest.mark.releases
STATES = {
    SupportLevel.REQUIRED: "applied",
    SupportLevel.RECOMMENDED: "applied",
    SupportLevel.OPTIONAL: "off",
    SupportLevel.UPSTREAM: "upstream",
    SupportLevel.NOT_APPLICABLE: "not-applicable",
}
OTHER = {"native": "family", "family": "native"}
# What does not depend on the release is asked of one, and of all in the matrix.
once = (
    in_turns
    if WHOLE
    else pytest.mark.parametrize(("version", "arch"), [(DAILY[1], "native")])
)


@pytest.fixture
def expected(version, arch):
    """fix → its state after an apply, by what the release was found to need."""
    return {
        fix: STATES[modes[arch][version]] for fix, modes in load_support("vllm").items()
    }


def states(outcome):
    return {verdict.fix.id: verdict.state.value for verdict in outcome.verdicts}


@in_turns
def test_apply_is_idempotent_and_revert_gives_back_every_byte(
    version, arch, expected, tree, snapshot, recipe, ask, cli
):
    root = tree(version)
    pristine = snapshot(root)

    first = apply(root, recipe, ask(arch))
    patched = snapshot(root)
    again = apply(root, recipe, ask(arch))
    shown = json.loads(cli("fixes", "--vllm-src", root, "--json").stdout)

    assert states(first) == expected
    assert (states(again), again.written) == (expected, ())
    assert {fix["id"]: fix["state"] for fix in shown["fixes"]} == expected
    assert (shown["version"], shown["arch"]) == (version, arch)
    assert snapshot(root) == patched
    assert set(first.written) == {
        path for path, known in patched.items() if pristine.get(path, known) != known
    }
    assert revert(root, "vllm") == tuple(sorted(first.written))
    assert snapshot(root) == pristine


@once
def test_a_patched_tree_without_its_ledger_is_recognised(
    version, arch, expected, tree, snapshot, recipe, ask
):
    root = tree(version)
    apply(root, recipe, ask(arch))
    shutil.rmtree(root / ".patchkit")
    patched = snapshot(root)

    again = apply(root, recipe, ask(arch))

    assert (states(again), again.written) == (expected, ())
    assert snapshot(root) == patched
    assert revert(root, "vllm") == ()


CONFIGS = "vllm/model_executor/layers/fused_moe/configs"
GB10 = "device_name=NVIDIA_GB10"
BLOCK = ",dtype=fp8_w8a8,block_shape=[128,128]"
# Since 0.28.0 upstream ships the first two.
TUNED = [
    f"E=256,N=512,{GB10}{BLOCK}.json",
    f"E=512,N=512,{GB10}{BLOCK}.json",
    f"E=128,N=704,{GB10},dtype=fp8_w8a8.json",
    f"E=128,N=768,{GB10},dtype=fp8_w8a8.json",
    f"E=160,N=384,{GB10},dtype=fp8_w8a8.json",
    f"E=512,N=2688,{GB10}.json",
    f"E=512,N=512,{GB10},dtype=fp8_w8a8.json",
]


def created(version):
    return {
        f"{CONFIGS}/{name}"
        for name in TUNED[2 * (Version(version) >= Version("0.28")) :]
    }


def test_tuned_configs_are_found_by_every_release(version, release, recipe, ask):
    plan = plan_for(
        open_workspace(release(version), "vllm"), recipe, ask(only={"moe_configs"})
    )

    (said,) = prove(plan)

    assert {
        path for path, (before, _) in plan.texts.items() if before is None
    } == created(version)
    assert plan.texts.keys() == created(version)
    assert said.startswith(
        "get_moe_configs finds 7 configs for NVIDIA GB10, and for NVIDIA H200"
    )
