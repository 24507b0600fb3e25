"""The command line as its users meet it: exit codes, messages, JSON, and what is left on disk."""

import json
import shutil

import pytest

from patchkit.durable.lock import locked

RELEASE = "0.19.1"
EDITED = "vllm/model_executor/layers/quantization/utils/w8a8_utils.py"


@pytest.fixture
def root(tree):
    return tree(RELEASE)


def fixes(done):
    return {fix["id"]: fix["state"] for fix in json.loads(done.stdout)["fixes"]}


def as_git_keeps_it(files):
    """Return a snapshot with what git keeps of a mode: the rest comes from the umask."""
    kind_and_owner_runs = 0o170100
    return {
        path: (int(mode, 8) & kind_and_owner_runs, text)
        for path, (mode, text) in files.items()
    }


@pytest.mark.releases
def test_a_release_by_name_is_the_tree_that_apply_made_below_build(
    cli, sdist, tmp_path, snapshot
):
    spec, made = f"vllm=={RELEASE}", tmp_path / "build" / f"vllm-{RELEASE}"
    sdist(RELEASE)
    assert cli("revert", spec, rc=2).stderr.startswith("error: vllm==")
    first = json.loads(cli("apply", "--vllm-src", spec, "--offline", "--json").stdout)
    patched = snapshot(made)
    assert (first["version"], first["torch_cuda_arch_list"]) == (RELEASE, "12.1a")
    assert EDITED in first["written"]
    assert json.loads(cli("apply", spec, "--json").stdout)["written"] == []
    assert snapshot(made) == patched

    assert fixes(cli("fixes", spec, "--json"))["version_label"] == "applied"
    assert cli("diff", spec).stdout == cli("diff", made).stdout != ""
    assert json.loads(cli("revert", made, "--json").stdout)["restored"]
    assert "nothing to do" in cli("revert", made).stdout


@pytest.mark.releases
def test_another_version_in_the_place_of_a_release_is_refused(cli, tree, tmp_path):
    (tmp_path / "build").mkdir()
    shutil.copytree(tree(RELEASE), tmp_path / "build" / "vllm-0.24.0")
    cli("apply", "build/vllm-0.24.0", "--only", "version_label")
    for verb in ("fixes", "apply"):
        assert (
            f"holds vllm {RELEASE}, not 0.24.0"
            in cli(verb, "vllm==0.24.0", rc=3).stderr
        )


@pytest.mark.releases
def test_only_reading_writes_nothing(cli, root, snapshot, tmp_path):
    before = snapshot(root)
    folders = {
        place: place.stat().st_mode
        for place in (root, *root.rglob("*"))
        if place.is_dir()
    }
    for place in folders:
        place.chmod(0o555)
    states = fixes(cli("fixes", "--vllm-src", root, "--json"))
    planned = json.loads(cli("apply", "--vllm-src", root, "--dry-run", "--json").stdout)
    diff = cli("diff", "--vllm-src", root).stdout
    groups = json.loads(cli("archs", "--vllm-src", root, "--json").stdout)["groups"]
    for place, mode in folders.items():
        place.chmod(mode)

    assert set(states.values()) == {"apply", "off", "upstream", "not-applicable"}
    assert {fix["id"]: fix["state"] for fix in planned["fixes"]} == states
    assert (planned["dry_run"], planned["written"]) == (True, [])
    assert f"+++ b/{EDITED}\n" in diff
    assert {"exact", "jit", "none"} == {group["loads"] for group in groups}
    assert snapshot(root) == before


@pytest.mark.releases
def test_the_tree_becomes_what_is_asked_for_whatever_was_before(
    cli, root, tree, snapshot, git
):
    fresh = tree(RELEASE, name="fresh")
    also = ("--vllm-src", fresh, "--with", "moe_configs")  # which creates files
    diff = cli("diff", *also).stdout
    cli("apply", *also)
    assert cli("diff", *also[:2]).stdout == diff  # whenever one asks
    patched = as_git_keeps_it(snapshot(fresh / "vllm"))
    cli("revert", *also[:2])
    git(fresh, "apply", stdin=diff)
    assert as_git_keeps_it(snapshot(fresh / "vllm")) == patched
    git(fresh, "apply", "--reverse", stdin=diff)
    cli("apply", "--vllm-src", fresh)

    one = json.loads(
        cli("apply", "--vllm-src", root, "--only", "fp8_grouped_gemm", "--json").stdout
    )
    states = fixes(cli("fixes", "--vllm-src", root, "--json"))
    cli("apply", "--vllm-src", root)

    assert one["written"] == [EDITED]
    assert (states["fp8_grouped_gemm"], states["arch_lists"]) == ("applied", "off")
    assert as_git_keeps_it(snapshot(root)) == as_git_keeps_it(snapshot(fresh))


@pytest.mark.releases
@pytest.mark.parametrize(
    ("alter", "says"),
    [
        (
            lambda text: text.replace("def cutlass_group", "def cutlass_groups"),
            [EDITED, "gemm"],
        ),
        (lambda text: text + "def (\n", [EDITED, "not valid Python"]),
    ],
    ids=["another function", "syntax error"],
)
def test_drift_is_named_and_nothing_is_written(
    cli, root, rewrite, snapshot, alter, says
):
    rewrite(root / EDITED, alter((root / EDITED).read_text()))
    before = snapshot(root)

    for verb in ("apply", "diff", "fixes"):
        done = cli(verb, "--vllm-src", root, rc=4)
        # A table breaks its lines.
        said = " ".join((done.stdout + done.stderr).split())
        assert not [words for words in says if words not in said], said

    assert snapshot(root) == before


@pytest.mark.releases
def test_a_tree_that_is_being_worked_on_is_busy(cli, root, snapshot):
    before = snapshot(root)
    with locked(root):
        said = cli("apply", "--vllm-src", root, rc=6).stderr
        assert "another patchkit is working on this tree" in said
        assert fixes(cli("fixes", "--vllm-src", root, "--json"))
    assert snapshot(root) == before


@pytest.mark.releases
def test_a_patched_file_that_was_edited_is_never_overwritten(
    cli, root, rewrite, snapshot
):
    written = json.loads(cli("apply", "--vllm-src", root, "--json").stdout)["written"]
    shown = json.loads(cli("revert", "--vllm-src", root, "--json").stdout)
    assert shown == {"restored": written}
    cli("apply", "--vllm-src", root)
    rewrite(root / EDITED, (root / EDITED).read_text() + "# mine\n")
    before = snapshot(root)
    for verb in ("revert", "apply", "fixes", "diff"):
        said = cli(verb, "--vllm-src", root, rc=4).stderr
        assert f"{EDITED}: edited since patchkit wrote it" in said
    assert snapshot(root) == before
