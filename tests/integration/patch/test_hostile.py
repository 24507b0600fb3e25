"""Trees that do more than decide: what is only read and proved must leave no trace."""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from patchkit.apply import apply
from patchkit.cli.options import located
from patchkit.edit.splice import git_diff
from patchkit.errors import PatchkitError, ProofError
from patchkit.proof.sandbox import missing
from patchkit.recipes.nccl.build_files import COMMON_MK, gencodes, make_flags
from patchkit.recipes.vllm.archs import evaluate
from patchkit.source.detect import detect
from patchkit.source.resolve import SourceOptions
from patchkit.source.tree import Sandboxed
from patchkit.target import targets
from support import run_program, write_files
from support.needed import need

RELEASE = "0.33.0"
DEVICE = "vllm/platforms/interface.py"
FIX = "deepgemm_sm12x"
PARTS = (
    "CMakeLists.txt",
    "cmake",
    "PKG-INFO",
    "setup.py",
    "vllm/__init__.py",
    "vllm/platforms",
)
CLASS = "class DeviceCapability(NamedTuple):\n"
sandboxed = pytest.mark.skipif(missing() != "", reason=f"no sandbox here: {missing()}")
pytestmark = pytest.mark.releases


@pytest.fixture
def marked(release, tree, rewrite, tmp_path):
    """A tree with a line more in a file; {mark} stands for a path that nothing may make.

    Unless it is ``whole``, only what the arch lists and the fix of DeepGEMM are decided by.
    """

    def part():
        for each in PARTS:
            source, place = release(RELEASE) / each, tmp_path / "tree" / each
            place.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, place, copy_function=os.link)
            else:
                place.hardlink_to(source)
        return tmp_path / "tree"

    def make(path, line, *, after="", whole=False):
        root = tree(RELEASE) if whole else part()
        text = (root / path).read_text()
        assert after in text
        at = text.index(after) + len(after)
        line = line.format(mark=tmp_path / "mark", tree=root)
        rewrite(root / path, f"{text[:at]}{line}\n{text[at:]}")
        return root

    return make


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "mark"


# The first of each is what CMake keeps a replaced command under.
CMAKE = (
    "_execute_process(COMMAND touch {mark})",
    "_file(WRITE {mark} x)",
    "_file(DOWNLOAD file://{tree}/setup.py {mark})",
    "_configure_file({tree}/setup.py {mark})",
)


@sandboxed
@pytest.mark.parametrize("line", CMAKE)
def test_cmake_files_run_and_write_nothing(line, marked, mark, snapshot):
    stock = detect(marked("CMakeLists.txt", line), "vllm")
    before = snapshot(stock.root)

    def run(tree):
        try:
            evaluate(tree, targets()["gb10"], "12.0", "13.0")
        except PatchkitError as error:
            return error.exit_code
        return 0

    assert run(stock) in (
        0,
        5,
    )  # a command that fails stops CMake, or says so to the file
    assert not mark.exists()
    assert snapshot(stock.root) == before
    run(replace(stock, sandboxed=Sandboxed.NEVER))
    assert mark.exists()  # else this test would prove nothing


@sandboxed
def test_what_only_looks_does_nothing_of_a_tree(marked, mark, cli):
    lines = "_execute_process(COMMAND touch {mark})\nconfigure_file(a {mark})"
    root = marked("CMakeLists.txt", lines, whole=True)
    cli("archs", "--vllm-src", root)
    cli("apply", "--vllm-src", root, "--dry-run")
    assert not mark.exists()
    done = cli("archs", "--vllm-src", root, "--trust-source")
    assert done.stderr == "not sandboxed: --trust-source\n"
    assert mark.exists()


RUN = 'import subprocess; subprocess.run(["touch", "{mark}"])'


@sandboxed
def test_what_it_hides_it_has_not_done_either(marked, mark, recipe, ask):
    hidden = f"    try:\n        {RUN}\n    except BaseException:\n        pass"
    root = marked(DEVICE, hidden, after=CLASS)
    (said,) = apply(root, recipe, ask(only={FIX}), dry_run=True).proofs
    assert said.startswith("DeepGEMM: False on 12.1")
    assert not mark.exists()


FORGED = {
    "an answer": "import os; os.write(1, b'[\"proved\"]'); os._exit(0)",
    "our functions": "import sys, os; sys.modules['patchkit.proof.questions']._answer = None; "
    "sys.modules['patchkit.recipes.vllm.routing'].ask = lambda *_: ['proved']; raise SystemExit",
    "our process": "import os; os.kill(os.getppid(), 9)",
}


@sandboxed
@pytest.mark.parametrize("forged", FORGED)
def test_an_answer_cannot_be_forged_from_inside(forged, marked, recipe, ask, snapshot):
    line = FORGED[forged].replace("{", "{{").replace("}", "}}")
    root = marked(DEVICE, f"    {line}", after=CLASS)
    before = snapshot(root)
    with pytest.raises(ProofError):
        apply(root, recipe, ask(only={FIX}))
    assert snapshot(root) == before


# A machine that has none. The filter is a real one, in the process that becomes patchkit.

WITHOUT = """\
import errno, os, sys
from patchkit.proof import seccomp
seccomp.libc.prctl(38, 1, 0, 0, 0)  # no_new_privs
seccomp.load(seccomp.packed({"landlock_create_ruleset": errno.ENOSYS}))
os.execv(sys.executable, [sys.executable, "-m", "patchkit", *sys.argv[1:]])
"""


@pytest.fixture
def without(environment, tmp_path):
    def run(*arguments):
        words = (sys.executable, "-c", WITHOUT, *arguments)
        done = run_program(*words, rc=None, cwd=tmp_path, env=environment)
        assert "internal error" not in done.stderr
        return done

    return run


@sandboxed
def test_without_a_sandbox_only_what_is_locked_or_trusted_is_run(
    tree, without, snapshot, tmp_path
):
    root = tree(RELEASE)
    before = snapshot(root)
    refused = without("apply", "--vllm-src", root)
    assert refused.returncode == 9
    assert "there is no sandbox here: the kernel has no Landlock" in refused.stderr
    assert "--trust-source" in refused.stderr
    assert snapshot(root) == before

    status = without("fixes", "--vllm-src", root)  # nothing has to be run for that
    assert status.returncode == 0

    trusted = without("apply", "--vllm-src", root, "--dry-run", "--trust-source", "-v")
    assert trusted.returncode == 0
    assert trusted.stderr == "not sandboxed: --trust-source\n"
    assert "proved DeepGEMM: " in trusted.stdout

    locked = without(
        "apply", "--vllm-src", f"vllm=={RELEASE}", "--dry-run", "--offline", "-v"
    )
    assert locked.returncode == 0
    assert "sandbox" not in locked.stderr
    assert "proved DeepGEMM: " in locked.stdout
    diff = tmp_path / "a.diff"  # for which no lock vouches
    diff.write_text(git_diff("vllm/new.py", None, "NEW = 1\n"))
    words = ("apply", f"vllm=={RELEASE}", "--dry-run", "--offline", "--patch", diff)
    assert without(*words).returncode == 9


def test_only_what_this_run_unpacks_of_a_locked_archive_is_locked(
    sdist, tmp_path, monkeypatch
):
    sdist(RELEASE)
    monkeypatch.chdir(tmp_path)
    released = SourceOptions("vllm", f"vllm=={RELEASE}", offline=True)
    tree = Path("build") / f"vllm-{RELEASE}"
    for source, expected in (
        (released, Sandboxed.IF_POSSIBLE),
        (
            released,
            Sandboxed.ALWAYS,
        ),  # a folder by now, and anybody may have written into it
        (SourceOptions("vllm", str(tree)), Sandboxed.ALWAYS),
        (SourceOptions("vllm", str(tree), trusted=True), Sandboxed.NEVER),
    ):
        with located(source, keep=True) as (path, sandboxed):
            assert (path, sandboxed) == (tree, expected)


MAKE = ("X := $(shell touch {mark})", "$(file >{mark},x)")


@sandboxed
@pytest.mark.parametrize("line", MAKE)
def test_makefiles_write_nothing(line, nccl, rewrite, mark):
    need("make")
    root = nccl()
    text = (root / COMMON_MK).read_text()
    rewrite(root / COMMON_MK, f"{line.format(mark=mark)}\n{text}")

    def archs(tree):
        try:
            return len(gencodes(make_flags(tree, "13.0")))
        except PatchkitError as error:
            return error.exit_code

    tree = detect(root, "nccl")
    assert archs(tree) in (5, 7)  # 7 archs, or a proof that failed
    assert not mark.exists()
    archs(replace(tree, sandboxed=Sandboxed.NEVER))
    assert mark.exists()


@sandboxed
def test_a_checkout_that_lacks_objects_fetches_none(tmp_path, git, mark):
    """`git describe` would fetch them as the checkout's own settings say: with a program."""
    origin, clone = tmp_path / "origin", tmp_path / "vllm"
    names = ("setup.py", "CMakeLists.txt", "cmake/utils.cmake", "vllm/__init__.py")
    write_files(origin, dict.fromkeys(names, ""))
    git(origin, "init", "-q")
    git(origin, "add", ".")
    git(origin, "commit", "-qm", "a")
    git(origin, "config", "uploadpack.allowFilter", "true")
    git(
        tmp_path,
        "clone",
        "-q",
        "--no-local",
        "--filter=tree:0",
        f"file://{origin}",
        str(clone),
    )
    git(clone, "tag", "-am", "x", "v0.33.0")
    for name, value in (
        ("remote.origin.url", f"ext::sh -c touch% {mark}"),
        ("protocol.ext.allow", "always"),
    ):
        git(clone, "config", name, value)
    commit = git(clone, "rev-parse", "HEAD").strip()
    git(clone, "update-ref", "refs/tags/v0.33.0", commit)
    for pack in (clone / ".git/objects/pack").iterdir():
        if pack.suffix != ".promisor":
            pack.unlink()
    with pytest.raises(PatchkitError):
        detect(clone, "vllm")
    assert not mark.exists()
    run_program("git", "-C", clone, "describe", "--tags", "--long", rc=None)
    assert mark.exists()
