"""One word for one thing: SOURCE without an option, --without, -o - for standard output."""

from __future__ import annotations

import json
import shutil

import pytest

RELEASE = "0.19.1"


def fixes(done):
    return {fix["id"]: fix["state"] for fix in json.loads(done.stdout)["fixes"]}


@pytest.mark.releases
def test_a_source_needs_no_option_and_a_release_is_the_tree_that_apply_made(cli, release, tmp_path):
    """apply, status, diff and revert of ``vllm==X``: one tree, below build/."""
    spec, made = f"vllm=={RELEASE}", tmp_path / "build" / f"vllm-{RELEASE}"
    release(RELEASE)  # skips where it cannot be had
    assert cli("revert", spec, rc=2).stderr.startswith("error: vllm==")
    cli("apply", spec, "--only", "version_label")

    assert fixes(cli("status", spec, "--json"))["version_label"] == "applied"
    assert cli("diff", spec).stdout == cli("diff", made).stdout != ""
    assert "nothing to do" in cli("apply", spec, "--only", "version_label").stdout
    assert json.loads(cli("revert", spec, "--json").stdout)["restored"]
    for again in (made, spec):
        assert "nothing to do" in cli("revert", again).stdout


@pytest.mark.releases
def test_another_version_in_the_place_of_a_release_is_refused(cli, tree, tmp_path):
    (tmp_path / "build").mkdir()
    shutil.copytree(tree(RELEASE), tmp_path / "build" / "vllm-0.24.0")
    cli("apply", "build/vllm-0.24.0", "--only", "version_label")

    for verb in ("status", "revert", "apply"):
        assert f"holds vllm {RELEASE}, not 0.24.0" in cli(verb, "vllm==0.24.0", rc=3).stderr


def test_former_spellings_go_on_working(cli):
    for former, verb in (("cluster up", "up"), ("env check", "check"), ("export lws", "export")):
        assert cli(*former.split(), "--help").stdout.startswith(f"Usage: patchkit {verb} ")


@pytest.mark.parametrize(
    ("named", "says"),
    [
        (["no-such-thing"], "says whether it is vLLM or NCCL"),
        (["vllm==0.24.0", "--vllm-src", "vllm==0.24.0"], "this verb takes one source"),
    ],
)
def test_a_source_that_cannot_be_told(cli, named, says):
    assert says in cli("diff", *named, rc=2).stderr
