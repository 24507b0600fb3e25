"""Files of fixes with mistakes in them, read by the command line."""

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import patchkit
from patchkit.edit.python import swap
from patchkit.errors import DriftError, RecipeError
from patchkit.patching.recipe import (
    explain_failure,
    load_fixes,
    load_recipe,
    load_recipes,
)
from support import write_files

FILE = "recipes/vllm/fixes/marlin_sass.py"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A patchkit of its own, recipes and all."""
    return shutil.copytree(
        Path(patchkit.__file__).parent, tmp_path_factory.mktemp("a") / "patchkit"
    )


@pytest.fixture
def refused(copy, cli):
    """What patchkit says of a file of its own, and how that was changed."""

    def run(path, before, after, *arguments):
        place = copy / path
        former = place.read_text() if place.exists() else None
        assert before == "" or former.count(before) == 1
        changed = former.replace(before, after) if former else after
        place.write_text(changed)
        try:
            done = cli(
                *arguments,
                rc=RecipeError.exit_code,
                # Bytecode of the changed file would outlive it: same second, same size.
                env={
                    "PYTHONPATH": str(copy.parent),
                    "PYTHONDONTWRITEBYTECODE": "1",
                },
            )
            return SimpleNamespace(stderr=done.stderr, changed=changed)
        finally:
            place.unlink() if former is None else place.write_text(former)

    return run


@pytest.mark.parametrize(
    ("path", "before", "after", "at", "says"),
    [
        (FILE, "FIX =", "FIXX =", "", "AttributeError: module"),
        (FILE, 'layer="build"', 'layer="x"', "FIX =", "RecordError: [1]: is 'x', not"),
        (
            FILE,
            "title=",
            "titel=",
            "FIX =",
            "TypeError: Fix has no field 'titel'",
        ),
        # Python 3.12 on has more words than the name.
        (FILE, "kit.required", "kit.reqired", "kit.reqired", "AttributeError: "),
        (
            FILE,
            '">=0.11',
            '">>=0.11',
            "kit.required(",
            "InvalidSpecifier: Invalid specifier: '>>=0.11.1",
        ),
        (
            FILE,
            'SASS for the device",',
            'SASS for the device"',
            "title=",
            "invalid syntax. Perhaps you forgot a c",
        ),
        (
            FILE,
            "import kit",
            "import kid",
            "kid",
            "ImportError: cannot import name 'kid'",
        ),
    ],
)
def test_a_mistake_is_shown_with_its_place(
    path, before, after, at, says, copy, refused
):
    said = refused(path, before, after, "fixes")
    place = f"{copy / path}:{line_of(said.changed, at)}"
    assert f"error: {place}: {says}" in said.stderr
    assert "next: correct it, or install patchkit again" in said.stderr


def test_a_mistake_in_the_evidence_is_shown_with_its_fix(copy, refused):
    place = "recipes/vllm/evidence.toml"
    source = 'source = "vLLM 0.12.0 mxfp4.py", established = '
    said = refused(place, f'{source}"read"', f'{source}"rumor"', "fixes")
    row = "mxfp4_moe_marlin[1].established"
    assert f"error: {copy / place}: {row}: is 'rumor', not one of" in said.stderr


def test_evidence_of_no_fix_is_refused(copy, refused):
    place = "recipes/nccl/evidence.toml"
    said = refused(place, "make_cuda13 = [", "make_cuda = [", "fixes")
    what = "the recipe has no fix make_cuda\n"
    assert f"error: {copy / place}: {what}" in said.stderr
    assert "next: the fixes are make_archs, make_cuda13, cmake_archs" in said.stderr


def test_a_fix_of_a_user_may_list_its_evidence(tmp_path):
    fix = """\
from patchkit.recipes import kit
FIX = kit.Fix(
    title="t", symptom="s", why="w", needs=(), upstream="u",
    evidence=[kit.Evidence("claim", "source", "KIND")],
    look=lambda tree, request: kit.upstream("r"),
)
"""
    files = {"read": fix.replace("KIND", "read"), "rumor": fix.replace("KIND", "rumor")}
    home = tmp_path / "of_mine"
    write_files(home / "fixes", {f"{name}.py": text for name, text in files.items()})
    (loaded,) = load_fixes(home, ["read"])
    assert (loaded.id, loaded.evidence[0].established) == ("read", "read")
    with pytest.raises(RecipeError, match="is 'rumor', not one of measured"):
        load_fixes(home, ["rumor"])


def test_every_file_holds_the_fix_of_its_name():
    for recipe in load_recipes():
        files = (recipe.home / "fixes").glob("[!_]*.py")
        assert sorted(file.stem for file in files) == sorted(
            fix.id for fix in recipe.fixes
        )


@pytest.mark.e2e
def test_a_mistake_in_a_function_is_shown_when_it_is_called(refused, release, copy):
    apply = ("apply", "--vllm-src", release("0.33.0"), "--dry-run")
    # Of another length: Python tells a changed file by its size and the second of its time.
    said = refused(FILE, "if not lists", "if not anything", *apply)
    place = f"{copy / FILE}:{line_of(said.changed, 'if not anything')}"
    assert f"error: {place}: NameError: name 'anything' is not defined" in said.stderr
    assert "next: leave it out with --without marlin_sass, and report it" in said.stderr


def full_disk():
    raise OSError(errno.ENOSPC, "No space left on device")


def no_memory():
    raise MemoryError


def deep_code():
    text = f"def f():\n    x = {'-' * 900}1\n    return a < 9\n"
    swap("a.py", text, "f", "a < 9", "a < 12", note="")


@pytest.mark.parametrize(
    ("look", "told"),
    [(full_disk, OSError), (no_memory, MemoryError), (deep_code, DriftError)],
)
def test_what_fails_below_a_fix_is_no_mistake_in_it(look, told):
    with pytest.raises(told), explain_failure(load_recipe("vllm").fixes[0]):
        look()


def line_of(text, part):
    return text[: text.index(part)].count("\n") + 1
