"""Trees as people have them: without tags, without history, and forks that kept a release's tag."""

import re

import pytest

from patchkit.apply import apply, revert
from patchkit.patching.workspace import open_workspace
from patchkit.source.detect import detect

pytestmark = pytest.mark.releases
CALLED, CODE = "0.21.0", "0.24.0"  # how a fork is tagged, and whose code it has
GUARD = "csrc/libtorch_stable/quantization/w8a8/cutlass/scaled_mm_entry.cu"


@pytest.fixture
def copied(tree, release):
    """A tree of a release without what says its version."""
    root = tree(CODE)
    (root / "PKG-INFO").unlink()
    (root / "pyproject.toml").hardlink_to(release(CODE) / "pyproject.toml")
    return root


@pytest.fixture
def fork(copied, git):
    git(copied, "init", "--quiet")
    git(copied, "add", "--all")
    git(copied, "commit", "--quiet", "--message", "ours")
    return copied


def test_files_tell_the_version_that_no_tag_tells(copied, rewrite, cli, monkeypatch):
    found = detect(copied, "vllm")
    assert (str(found.version), found.kind) == (CODE, "archive")
    assert re.search(
        r"(\d+) of \1 files that fixes look at are as in 0.24.0$", found.note
    )
    rewrite(copied / "setup.py", (copied / "setup.py").read_text() + "# ours\n")
    found = detect(copied, "vllm")
    assert str(found.version) == "0.24.0.dev0+untagged"
    assert (
        "files that fixes look at are as in 0.24.0; the code alone decides"
        in found.note
    )
    said = " ".join(cli("apply", copied, "--source-version", "0.24.0").stdout.split())
    assert said.startswith("vllm 0.24.0 archive")
    assert "note the version, 0.24.0, is as it was named" in said
    # The ledger has it from here on, whatever the patched files are like.
    assert str(detect(copied, "vllm").version) == CODE
    revert(copied, "vllm")
    monkeypatch.setenv("SETUPTOOLS_SCM_PRETEND_VERSION", "0.23.0")
    assert str(detect(copied, "vllm").version) == "0.23.0"
    monkeypatch.setenv("SETUPTOOLS_SCM_PRETEND_VERSION_FOR_VLLM", "0.22.0")
    assert str(detect(copied, "vllm").version) == "0.22.0"


def test_a_fork_with_the_tag_of_a_release_is_decided_by_its_code(
    fork, git, recipe, ask, snapshot, rewrite, cli
):
    git(fork, "tag", f"v{CALLED}")
    pristine = snapshot(fork)
    outcome = apply(fork, recipe, ask())
    notes = {v.fix.id: v.note for v in outcome.verdicts if v.state.value == "upstream"}
    expected = (
        f"fp8_grouped_gemm: {GUARD} is not that of 0.21.0; decided by the code alone"
    )
    assert notes["fp8_grouped_gemm"] == expected
    assert any("kernel groups are built for 12.1a" in proof for proof in outcome.proofs)
    revert(fork, "vllm")
    assert snapshot(fork) == pristine
    # What the fork has not committed was edited by hand, and the release's code is expected.
    rewrite(fork / GUARD, (fork / GUARD).read_text() + "// edited\n")
    refused = cli("apply", fork, rc=4).stderr
    assert f"fp8_grouped_gemm: {CALLED} is known to need this" in refused
    words = refused.rpartition("leave out what does not fit: ")[2].split()
    assert words[-4:] == ["apply", str(fork), "--without", "fp8_grouped_gemm"]
    cli(*words[-4:])
    assert open_workspace(fork, "vllm").ledger.request.skip == ("fp8_grouped_gemm",)
