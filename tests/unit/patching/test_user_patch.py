"""Patches that a user names: exact lines decide, and what does not fit is told."""

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from patchkit.edit.splice import git_diff
from patchkit.errors import HostError, UsageError
from patchkit.patching.fix import Patch, Request
from patchkit.patching.plan import make_plan
from patchkit.patching.recipe import load_recipe
from patchkit.patching.user_patch import fixes_for, read_patches
from patchkit.records import RecordError, record

A, B = "vllm/a.py", "vllm/b.py"
LINES = [f"x{number}\n" for number in range(40)]


def text_of(changes):
    """The lines with some replaced, by number."""
    return "".join(changes.get(number, line) for number, line in enumerate(LINES))


STOCK, HALF, WANTED = (
    text_of(it) for it in ({}, {4: "4\n"}, {4: "4\n", 30: "x30\nnew\n"})
)


@pytest.fixture
def patch_of(tmp_path):
    """Read a patch from a file: of a text, or of {path: (before, after)}."""

    def read(diff, name="1.diff"):
        if not isinstance(diff, str):
            diff = "".join(git_diff(path, *pair) for path, pair in diff.items())
        (tmp_path / name).write_bytes(diff.encode())
        return read_patches([tmp_path / name])[0]

    return read


@pytest.fixture
def judged(make_tree, ask):
    """The verdict on a patch, with the texts that it leads to."""

    def judge(patch, files, kind="sdist"):
        tree = make_tree("0.33.0", files, kind=kind)
        request = replace(ask(), patches=(patch,))
        plan = make_plan(tree, replace(load_recipe("vllm"), fixes=()), request)
        (verdict,) = plan.verdicts
        return verdict, {path: after for path, (_before, after) in plan.texts.items()}

    return judge


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({A: STOCK}, "apply vllm/a.py (+1 more): the patch fits"),
        ({A: f"0\n{STOCK}"}, "apply vllm/a.py (+1 more): the patch fits"),
        ({A: f"0\n{WANTED}", B: "new\n"}, "upstream vllm/a.py (+1 more): as the patch"),
        ({A: WANTED}, "drifted vllm/b.py: lacks what vllm/a.py has already"),
        ({A: HALF}, "drifted vllm/a.py:2: does not fit"),
        ({B: ""}, "drifted vllm/a.py: not found"),
        ({A: text_of({32: "y\n"})}, "drifted vllm/a.py:29: does not fit"),
        ({A: text_of({32: ""})}, "drifted vllm/a.py:29: does not fit"),
        (
            {A: f"0\n{STOCK}{STOCK}"},
            "drifted vllm/a.py: fits in several places, and not at the line that it names",
        ),
        (
            {A: STOCK, B: "mine\n"},
            "drifted vllm/b.py: is there already, with another text",
        ),
    ],
)
def test_the_code_decides(files, said, judged, patch_of):
    verdict, texts = judged(patch_of({A: (STOCK, WANTED), B: (None, "new\n")}), files)
    assert f"{verdict.state.value} {verdict.reason}".startswith(said)
    fits = {A: files.get(A, "").replace(STOCK, WANTED), B: "new\n"}
    assert texts == (fits if said.startswith("apply") else {})


def test_lines_that_stand_twice_are_where_the_patch_says(judged, patch_of):
    patch = patch_of({A: (STOCK * 2, STOCK + WANTED)})
    assert judged(patch, {A: STOCK * 2})[1] == {A: STOCK + WANTED}
    assert judged(patch, {A: f"0\n{STOCK}{STOCK}"})[0].state.value == "drifted"


HEAD = "@@ -1 +1 @@"
NAMES = "--- a/vllm/a.py\n+++ b/vllm/a.py\n"
BODY = f"diff --git a/vllm/a.py b/vllm/a.py\n{NAMES}{HEAD}\n-old\n+new\n"
CUDA, MOVE = "diff --git a/csrc/a.cu b/csrc/a.cu\n", "diff --git a/x b/y\n"
PICTURE = "diff --git a/docs/a.png b/docs/a.png\n"
BINARY = (
    "GIT binary patch\nliteral 2\nJcmYdd0002S0Am0E\n\nliteral 2\nJcmYdf0002Q0Ac_D\n\n"
)
BLOBS = f"index {'9' * 40}..{'2' * 40} 100644\n"
GONE = "@@ -1 +0,0 @@\n-1\n"
LINK = "new file mode 120000\n--- /dev/null\n+++ b/csrc/a.cu\n@@ -0,0 +1 @@\n+/etc\n"


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (git_diff("csrc/a.cu", "1\n", "2\n"), "csrc/a.cu: is in no wheel"),
        (
            f"{CUDA}deleted file mode 100644\n",
            "csrc/a.cu: the patch says `deleted file mode 100644`",
        ),
        (
            f"{MOVE}rename from b\nrename to csrc/a.cu\n",
            "csrc/a.cu: the patch says `rename from b`",
        ),
        (
            f"{CUDA}deleted file mode 100644\n--- a/csrc/a.cu\n+++ /dev/null\n{GONE}",
            "csrc/a.cu: the patch says `deleted file mode 100644`",
        ),
        (
            f"{CUDA}old mode 100644\nnew mode 100755\n",
            "csrc/a.cu: the patch says `old mode 100644`",
        ),
        (f"{CUDA}{BLOBS}{BINARY}", "csrc/a.cu: the patch says `GIT binary patch`"),
        (CUDA + LINK, "csrc/a.cu: the patch says `new file mode 120000`"),
        (git_diff("tests/é.py", None, "x\n"), ""),
        (
            f"{PICTURE}index 1111..2222\nBinary files a/docs/a.png and b/x differ\n",
            "",
        ),
    ],
)
def test_what_is_beyond_texts_or_beside_the_package(extra, reason, judged, patch_of):
    patch = patch_of(git_diff(A, "old\n", "new\n") + extra)
    verdict, texts = judged(
        patch, {A: "old\n"}, "installed" if "wheel" in reason else "sdist"
    )
    assert verdict.reason.startswith(reason)
    assert texts == ({} if reason else {A: "new\n"})
    assert bool(reason) == (verdict.state.value == "drifted") == (verdict.note == "")


PATHS = (
    "../a",
    "/etc/x",
    "a/./b",
    ".git/x",
    "x/.GIT/y",
    ".patchkit/ledger.json",
    "vllm/.Patchkit/x",
    "b/\\377",
    "a\\nb",
    "a\\033[2J",
    "\\000",
    f"vllm/{'a' * 256}",
    f"vllm/{'a/' * 2100}b.py",
)
HEADS = ("@@ -1,9999999999 +1 @@", "@@@ -1 -1 +1 @@@", "@@", "@@ -7 +7 @@")


def renamed(path):
    """Return the diff for another file, whose name git reads between quotes."""
    return BODY.replace(f"a/{A}", f'"a/{path}"').replace(f"b/{A}", f'"b/{path}"')


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "no diff\n",
            f"\0{BODY}",
            BODY.replace("\n", "\r\n"),
            BODY + BODY,
            BODY[:-5],
        ),
        *(renamed(path) for path in PATHS),
        *(
            BODY.replace(HEAD, head) for head in HEADS
        ),  # the last has no lines around it
        *(
            f"{BODY}{row}\n"
            for row in ("+more", " more", "-more", "Binary files a and b differ")
        ),
        *(BODY.replace("+new", "+old"), f"{HEAD}\n-old\n+new\n"),
        f"{MOVE}--- a/csrc/a.cu\n+++ b/b\n{HEAD}\n-1\n+2\n",
        f"{BODY}{NAMES.replace('a.py', 'b.py')}{HEAD}\n-old\n+new\n",
        BODY.removeprefix(f"diff --git a/{A} b/{A}\n"),
        f"{NAMES}{HEAD}\n-old\n+new\n{CUDA}deleted file mode 100644\n",
        f"{BODY}{CUDA}GIT binary patch\nliteral 1\n",
        f"{BODY}{PICTURE}Binary files a/docs/a.png and b/x differ\n",
        "".join(git_diff(f"vllm/{number}.py", None, "x\n") for number in range(1001)),
        BODY + "".join(f"@@ -{n},2 +{n},2 @@\n-a\n+b\n c\n" for n in range(9, 6000)),
        git_diff("vllm/a", None, "x\n") + git_diff("vllm/a/b/c.py", None, "x\n"),
    ],
)
def test_what_is_no_patch_is_refused(text, patch_of):
    with pytest.raises(UsageError):
        patch_of(text)


MAIL = "From 0 Mon Sep 17\nSubject: [PATCH 2/3] =?UTF-8?q?Gr=C3=B6=C3=9Fer?=\n  tables\n\nx\n---\n"


def test_mails_quoted_names_and_ends_of_files(judged, patch_of, tmp_path):
    quoted = BODY.replace(f"a/{A}", '"a/vllm/\\303\\244.py"').replace(
        f"b/{A}", '"b/vllm/\\303\\244.py"'
    )
    end = "\\ No newline at end of file\n-- \n2.1\n"
    patch = patch_of(MAIL + quoted + end)
    assert (patch.id, patch.title) == ("patch-1", "1")
    assert judged(patch, {"vllm/ä.py": "old\n"})[1] == {"vllm/ä.py": "new"}
    (tmp_path / "1.patch").write_text(MAIL + BODY)
    _, other = read_patches([tmp_path / "1.diff", tmp_path / "1.patch"])
    assert other.id == f"{patch.id}-{other.sha256[:8]}"
    with pytest.raises(RecordError, match="another sha256"):
        record(Patch, asdict(patch) | {"text": BODY})


def test_a_name_that_is_no_text_can_be_kept_in_a_ledger(tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.patch"))
    path.write_text(BODY)
    (patch,) = read_patches([path])
    assert (patch.id, patch.title) == ("patch-a", r"a\xff")
    assert record(Patch, asdict(patch)) == patch


@pytest.mark.parametrize("end", ["", "-- \n2.39.5\n"])
def test_a_series_that_changes_each_file_once(end, patch_of):
    following = (
        f"\nFrom {'0' * 40} Mon\nSubject: [PATCH 3/3] More\n\n---\n a | 2 +-\n\n"
    )
    series = MAIL + BODY + end + following + BODY.replace("a.py", "b.py") + end
    assert patch_of(series).text == series


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("vllm/a.py/x.py", "vllm/a.py/x.py: vllm/a.py is a file, and no folder"),
        ("vllm/a.py/x/y.py", "vllm/a.py/x/y.py: vllm/a.py is a file, and no folder"),
        ("vllm/sub", "vllm/sub: is not a file"),
    ],
)
def test_a_new_file_needs_its_place(path, said, judged, patch_of):
    verdict, texts = judged(
        patch_of({path: (None, "x\n")}), {A: STOCK, "vllm/sub/b.py": ""}
    )
    assert (verdict.state.value, verdict.reason.split("\n")[0]) == ("drifted", said)
    assert texts == {}


def texts():
    # Few different lines, so that hunks repeat and move.
    line = st.text(st.sampled_from("ab -+@\\\t\f\v\x85\u2028é𝟚"), max_size=2)
    return st.lists(line, max_size=12).map("\n".join)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=texts(), after=texts())
def test_a_diff_leads_to_its_own_text_or_nowhere(before, after, judged, patch_of):
    assume(before != after)
    patch = patch_of({A: (before, after)})
    verdict, made = judged(patch, {A: before})
    assert made == ({A: after} if verdict.state.value == "apply" else {})
    assert verdict.state.value in ("apply", "drifted")
    assert judged(patch, {A: after})[0].state.value in ("upstream", "drifted")


def test_settings_and_attributes_have_no_say(
    git, judged, patch_of, monkeypatch, tmp_path
):
    patch = patch_of({A: (STOCK, WANTED.replace("new\n", "new \n"))})
    (tmp_path / ".gitconfig").write_text(
        "[apply]\nwhitespace = fix\n[core]\nautocrlf = true\n"
    )
    (tmp_path / ".gitattributes").write_text("* text eol=crlf\n")
    git(tmp_path, "init", "--quiet")
    for name in ("HOME", "TMPDIR", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    monkeypatch.setattr("tempfile.tempdir", None)

    assert judged(patch, {A: STOCK})[1] == {A: WANTED.replace("new\n", "new \n")}
    assert not list(tmp_path.rglob("*.rej"))


def test_without_git_patches_are_refused_and_nothing_else(
    judged, patch_of, monkeypatch, tmp_path
):
    patch = patch_of({A: (STOCK, WANTED)})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostError, match="git is not installed") as caught:
        judged(patch, {A: STOCK})
    assert "--patch" in caught.value.why
    assert caught.value.hint == "install git, or leave --patch out"
    # A ledger that names a patch can still be read and compared.
    assert [fix.id for fix in fixes_for([], Request(target=None, patches=(patch,)))]
