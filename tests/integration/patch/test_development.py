"""Commits between two releases: some code that a fix is about is not there yet."""

from dataclasses import replace

import pytest
from packaging.version import Version

from patchkit.apply import apply, plan_for, revert
from patchkit.errors import DriftError
from patchkit.patching.plan import make_plan
from patchkit.patching.workspace import open_workspace
from support.selection import RELEASES, WHOLE

pytestmark = pytest.mark.releases
OLDER, NEWER = "0.11.1", "0.14.1"
COMMIT = "0.14.0.dev12+g1234567"
PYTHON = "vllm/model_executor/layers/quantization/utils/marlin_utils.py"
# What these fixes are about came between the two releases, in these files.
GENERATORS = ("csrc/**/generate_kernels.py",)
CHECKS = (PYTHON, "csrc/**/*marlin*/*.cu")


@pytest.fixture
def mixed(tree, release, rewrite):
    """A tree of the newer release, named ``version``, with the older one's files of patterns."""

    def make(version, *patterns, older=OLDER, newer=NEWER):
        root = tree(newer)
        for place in [place for pattern in patterns for place in root.glob(pattern)]:
            earlier = release(older) / place.relative_to(root)
            if earlier.exists():
                rewrite(place, earlier.read_bytes())
            else:
                place.unlink()
        metadata = (root / "PKG-INFO").read_text()
        assert metadata.count(f"\nVersion: {newer}\n") == 1
        changed = metadata.replace(f"\nVersion: {newer}\n", f"\nVersion: {version}\n")
        rewrite(root / "PKG-INFO", changed)
        return root

    return make


def test_code_that_is_not_there_yet_needs_no_fix(mixed, recipe, ask, snapshot, cli):
    root = mixed(COMMIT, *GENERATORS, *CHECKS)
    pristine = snapshot(root)
    found = {v.fix.id: v for v in apply(root, recipe, ask()).verdicts}
    for fix_id, reason in (
        ("marlin_fp8_generator", "no generator mentions SUPPORT_FP8"),
        ("marlin_w4a8_fp8", "0 definitions of get_marlin_input_dtype"),
    ):
        assert found[fix_id].state.value == "not-applicable"
        assert reason in found[fix_id].reason
        note = f"{fix_id} is left out: {COMMIT} is no release, and has no code for it"
        assert found[fix_id].note == note
        assert note in " ".join(cli("fixes", root).stdout.split())
    applied = {
        fix_id for fix_id, verdict in found.items() if verdict.state.value == "applied"
    }
    assert {"arch_lists", "marlin_sass", "sm120_guard", "fp8_grouped_gemm"} <= applied
    decided = f"{COMMIT} is not in the table; decided by the code alone"
    assert found["arch_lists"].note == decided
    assert decided in " ".join(cli("fixes", root).stdout.split())
    assert f"{COMMIT}.cu130.gb10.p" in (root / "setup.py").read_text()
    revert(root, "vllm")
    assert snapshot(root) == pristine


@pytest.mark.parametrize(
    ("version", "ring", "state"),
    [
        # As four commits of February and March 2026: the reader of the ring came after them.
        ("0.18.0rc1.dev3+g1234567", ("vllm/**/shm_broadcast.py",), "not-applicable"),
        ("0.17.2.dev3+g1234567", ("vllm/**/shm_broadcast.py",), "not-applicable"),
        # A commit after that reader.
        ("0.17.2.dev3+g1234567", (), "apply"),
    ],
)
def test_a_label_before_or_after_the_code_yields_to_the_code(
    version, ring, state, mixed, recipe, ask
):
    root = mixed(version, *ring, older="0.17.1", newer="0.18.0")
    outcome = apply(root, recipe, ask(only={"shm_spin"}), dry_run=True)
    [verdict] = [each for each in outcome.verdicts if each.fix.id == "shm_spin"]
    assert verdict.state.value == state
    excuse = f"{version} is not in the table; decided by the code alone"
    if ring:
        assert "'busy_loop_s: float = 1,' found 0 times" in verdict.reason
        excuse = (
            f"shm_spin is left out: {version} is no release, and has no code for it"
        )
    assert verdict.note == excuse
    assert len(outcome.proofs) == (not ring)


@pytest.mark.parametrize(
    ("patterns", "path", "before", "after", "says"),
    [
        # One half of what belongs together is there.
        (
            (PYTHON,),
            "",
            "",
            "",
            "input_dtype, expected 1; other code of this fix is there",
        ),
        # The code is there, and another one than any release has.
        (
            (),
            PYTHON,
            "is_device_capability(120)",
            "has_device_capability(120)",
            "found 0 times",
        ),
    ],
)
def test_code_that_is_there_in_another_form_is_drift(
    patterns, path, before, after, says, mixed, recipe, ask, rewrite
):
    root = mixed(COMMIT, *patterns)
    if path:
        text = (root / path).read_text()
        assert before in text
        rewrite(root / path, text.replace(before, after))
    with pytest.raises(
        DriftError, match=f"1 of {len(recipe.fixes)} fixes do not fit"
    ) as caught:
        plan_for(open_workspace(root, "vllm"), recipe, ask())
    assert says in caught.value.what


@pytest.mark.parametrize("version", RELEASES if WHOLE else [NEWER])
def test_the_first_commit_after_a_release_fits(version, release, recipe, ask):
    """Its files are those of the release, and its version is a development of the next one."""
    later = [known for known in recipe.supported if known > Version(version)]
    following = later[0].base_version if later else f"{Version(version).major}.999.0"
    tree = replace(
        open_workspace(release(version), "vllm").tree,
        version=Version(f"{following}.dev1+g1234567"),
    )
    request = ask(also={fix.id for fix in recipe.fixes})
    assert not make_plan(tree, recipe, request).drifted
