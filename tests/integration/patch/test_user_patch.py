"""`patchkit apply --patch` on a release: a patch among the fixes, kept and taken back."""

from __future__ import annotations

import json

import pytest

from patchkit.digests import digest

pytestmark = pytest.mark.releases
PATH, NEW = "vllm/version.py", "vllm/new.py"
MAIL = f"""\
Subject: [PATCH] Say where it is from

diff --git a/{NEW} b/{NEW}
new file mode 100644
--- /dev/null
+++ b/{NEW}
@@ -0,0 +1 @@
+FROM = "a pull request"
"""


def test_the_tree_becomes_what_is_asked_for(cli, tree, git, snapshot, tmp_path):
    root, diff = tree("0.33.0"), tmp_path / "a.patch"
    text = (root / PATH).read_text()
    (tmp_path / PATH).parent.mkdir()
    (tmp_path / PATH).write_text(text)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", PATH)
    (tmp_path / PATH).write_text(text.replace("\n", "\n# from a pull request\n", 1))
    diff.write_text(MAIL + git(tmp_path, "diff", PATH))
    pristine = snapshot(root)
    source, patch = ["--vllm-src", root], ["--patch", diff]

    assert "patch-say-where-it-is-from" in cli("apply", *source, *patch, "--dry-run").stdout
    assert snapshot(root) == pristine
    said = cli("apply", *source, *patch).stdout
    assert f"build vllm --src {root} --patch {diff}" in said
    assert (root / PATH).read_text() == (tmp_path / PATH).read_text()
    kept = json.loads((root / ".patchkit/ledger.json").read_text())["request"]["patches"]
    assert [(it["title"], it["sha256"]) for it in kept] == [
        ("Say where it is from", digest(diff.read_text()))
    ]
    labelled = (root / "setup.py").read_text()
    patched = snapshot(root)

    # What the ledger has is what is asked for, the file of the patch need not be there any more.
    assert "nothing to do" in cli("apply", *source, *patch).stdout
    (fix,) = (
        it for it in json.loads(cli("status", *source, "--json").stdout)["fixes"] if "-" in it["id"]
    )
    assert (fix["id"], fix["state"]) == ("patch-say-where-it-is-from", "applied")
    assert NEW in cli("diff", *source).stdout
    assert snapshot(root) == patched

    cli("apply", *source)
    assert not (root / NEW).exists()
    assert (root / PATH).read_text() == text
    assert (root / "setup.py").read_text() != labelled  # the version is a digest of all texts
    cli("apply", *source, *patch)
    assert snapshot(root) == patched
    cli("revert", *source)
    assert snapshot(root) == pristine


def test_a_patch_that_a_fix_is_in_the_way_of(cli, tree, tmp_path, snapshot):
    root, diff = tree("0.33.0"), tmp_path / "a.diff"
    cli("apply", "--vllm-src", root, "--only", "shm_spin")
    diff.write_text(cli("diff", "--vllm-src", root).stdout.replace("0.002", "0.004"))
    cli("revert", "--vllm-src", root)
    pristine = snapshot(root)
    said = cli("apply", "--vllm-src", root, "--patch", diff, rc=4).stderr
    assert "it fits the release, but a fix or a patch before it is in its way" in said
    assert snapshot(root) == pristine
    cli("apply", "--vllm-src", root, "--patch", diff, "--only", "fp8_linear_torch", "--dry-run")
