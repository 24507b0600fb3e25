"""FlashAttention 3 is left out where no device can run it, and vLLM decides as if it were there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from patchkit.apply import plan_for
from patchkit.errors import DriftError, ProofError
from patchkit.patching.fix import Case, State
from patchkit.patching.workspace import open_workspace
from patchkit.proof import upstream_code
from patchkit.proof.upstream_code import Anything
from patchkit.recipes.vllm.attention import FA2, FA3, INTERFACE, attention_code, flash_attention
from patchkit.target import targets
from patchkit.wheel.device.libraries import library_table

pytestmark = pytest.mark.releases
BOTH = (FA2, FA3)


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


def taken(tree, capability, built, version=None):
    return flash_attention(attention_code(tree, capability, built=built, version=version), tree)


def test_devices_that_the_table_of_libraries_names_keep_it(recipe):
    (known,) = (each for each in library_table().library if FA3 in each.file)
    majors = recipe.fix("fa3_hopper").majors
    assert {name: target.major in majors for name, target in targets().items()} == {
        name: not known.used_on(target) for name, target in targets().items()
    }


def test_a_gb10_takes_flash_attention_2_without_the_library(version, left_out):
    tree = left_out(version).patched
    without = taken(tree, (12, 1), (FA2,))

    assert without.pop("version") == 2
    assert set(without.values()) == {False}
    # Asked for by name, it was never to be had: up to 0.16 an assertion ends in None.
    assert taken(tree, (12, 1), (FA2,), 3) == taken(tree, (12, 1), BOTH, 3)
    # What the library decides on the device that it is for.
    assert [taken(tree, (9, 0), each)["version"] for each in (BOTH, (FA2,))] == [3, 2]


class CalledError(Exception):
    """Carries the name of the operator that is called past what the caller does with its result."""


class Operators:
    """torch.ops, in which any operator ends the call."""

    def __init__(self, name=""):
        self.name = name

    def __getattr__(self, name):
        return Operators(f"{self.name}.{name}".strip("."))

    def __call__(self, *_arguments, **_named):
        raise CalledError(self.name)


def test_no_operator_of_the_library_is_called_on_a_gb10(version, left_out):
    tree = left_out(version).patched
    if not tree.exists(INTERFACE):
        assert version in ("0.11.1", "0.14.1"), "it comes with flash-attention"
        return
    tensor = Anything("tensor")
    tensors = dict.fromkeys(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "out"), tensor)

    def called(capability, built):
        code = attention_code(tree, capability, built=built)
        torch = Anything("torch")
        torch.ops = Operators()
        code.put(INTERFACE, "torch", torch)
        number = flash_attention(code, tree)["version"]
        attend = code.get(INTERFACE, "flash_attn_varlen_func")
        with pytest.raises(CalledError) as caught:
            attend(**tensors, max_seqlen_q=1, max_seqlen_k=1, softmax_scale=1.0, fa_version=number)
        return str(caught.value)

    assert called((12, 1), (FA2,)) == f"{FA2}.varlen_fwd"
    assert called((9, 0), BOTH) == f"{FA3}.fwd"


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


@pytest.mark.parametrize(
    "edited",
    [
        'CMakeExtension(name="vllm.vllm_flash_attn._vllm_fa3_C", optional=True)',
        'CMakeExtension("vllm.vllm_flash_attn._vllm_fa3_C")',
    ],
)
def test_another_form_of_asking_for_it_is_drift(edited, tree, recipe, ask, rewrite):
    root = tree("0.27.1")
    text = (root / "setup.py").read_text()
    stock = 'CMakeExtension(name="vllm.vllm_flash_attn._vllm_fa3_C")'
    assert text.count(stock) == 1
    rewrite(root / "setup.py", text.replace(stock, edited))
    with pytest.raises(DriftError, match=r"fa3_hopper: setup.py:.*found 0 times"):
        plan_for(open_workspace(root), recipe, ask(only={"fa3_hopper"}))
