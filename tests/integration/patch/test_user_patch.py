"""`patchkit apply --patch` on a release: a patch among the fixes, kept and taken back."""

import json

import pytest

from patchkit.digests import digest
from patchkit.edit.splice import git_diff

pytestmark = pytest.mark.releases
PATH, NEW, ID = "vllm/version.py", "vllm/new.py", "patch-0001-say-where-it-is-from"
MAIL = f"""\
Subject: [PATCH] Say where it is from

diff --git a/{NEW} b/{NEW}
new file mode 100644
--- /dev/null
+++ b/{NEW}
@@ -0,0 +1 @@
+FROM = "a pull request"
"""


def test_the_tree_becomes_what_is_asked_for(cli, tree, snapshot, tmp_path):
    root, diff = tree("0.33.0"), tmp_path / "0001-Say-where-it-is-from.patch"
    text = (root / PATH).read_text()
    changed = text.replace("\n", "\n# from a pull request\n", 1)
    diff.write_text(MAIL + git_diff(PATH, text, changed))
    pristine, source, patch = snapshot(root), ["--vllm-src", root], ["--patch", diff]

    assert ID in cli("apply", *source, *patch, "--dry-run").stdout
    assert snapshot(root) == pristine
    assert (
        f"build vllm --src {root} --patch {diff}"
        in cli("apply", *source, *patch).stdout
    )
    assert (root / PATH).read_text() == changed
    (kept,) = json.loads((root / ".patchkit/ledger.json").read_text())["request"][
        "patches"
    ]
    assert (kept["title"], kept["sha256"]) == (
        "0001-Say-where-it-is-from",
        digest(diff.read_text()),
    )
    labelled, patched = (root / "setup.py").read_text(), snapshot(root)

    assert "nothing to do" in cli("apply", *source, *patch).stdout
    # The ledger has the patch: its file need not be there any more.
    fixes = json.loads(cli("fixes", *source, "--json").stdout)["fixes"]
    assert {fix["id"]: fix["state"] for fix in fixes}[ID] == "applied"
    assert NEW in cli("diff", *source).stdout
    assert snapshot(root) == patched

    cli("apply", *source)
    assert (not (root / NEW).exists(), (root / PATH).read_text()) == (True, text)
    assert (
        root / "setup.py"
    ).read_text() != labelled  # the version is a digest of all texts
    cli("apply", *source, *patch)
    assert snapshot(root) == patched
    cli("revert", *source)
    assert snapshot(root) == pristine

    # What a fix does, done otherwise: one of both has to be left out.
    cli("apply", *source, "--only", "shm_spin")
    diff.write_text(cli("diff", *source).stdout.replace("0.002", "0.004"))
    cli("revert", *source)
    said = cli("apply", *source, *patch, rc=4).stderr
    assert "leave a fix of the same lines out with --without" in said
    assert snapshot(root) == pristine
    cli("apply", *source, *patch, "--only", "fp8_linear_torch", "--dry-run")
