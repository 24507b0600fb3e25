"""Check what a release changes, what its files may hold, and the locks of the sessions."""

import shutil
from contextlib import nullcontext

import pytest

from patchkit.errors import ProofError, UsageError
from support.wheels import write_zip
from tools import locks
from tools.release import check_wheel, stamped

PACKAGE = '"""x"""\n\n__version__ = "1.2.0"\n'
CHANGES = "# Changelog\n\n## 1.2.0 (unreleased)\n\n- x\n\n## 1.1.0 (2026-01-02)\n"


def test_a_release_has_its_version_and_its_day():
    package, changes = stamped(PACKAGE, CHANGES, "1.3.0", "2026-11-22")
    assert package == '"""x"""\n\n__version__ = "1.3.0"\n'
    assert changes == CHANGES.replace("## 1.2.0 (unreleased)", "## 1.3.0 (2026-11-22)")


def test_what_is_no_release_is_refused():
    for version, changes, says in (
        ("1.1.9", CHANGES, "1.1.9 does not follow 1.2.0"),
        ("1.3.0.dev1", CHANGES, "1.3.0.dev1 does not follow 1.2.0"),
        ("1.3.0+x", CHANGES, r"1.3.0\+x does not follow 1.2.0"),
        ("one", CHANGES, "'one' is not a version"),
        (
            "1.3.0",
            CHANGES.replace("unreleased", "x"),
            r"no part `## X.Y.Z \(unreleased\)`",
        ),
    ):
        with pytest.raises(UsageError, match=says):
            stamped(PACKAGE, changes, version, "2026-11-22")


WANTED = ("py.typed", "recipes/targets.toml", "recipes/vllm/recipe.toml")


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        (
            [
                "patchkit/recipes/wheel/CMakeLists.txt",
                "patchkit_gb10-1.dist-info/RECORD",
            ],
            "",
        ),
        (
            ["patchkit_gb10-1.dist-info/RECORD"],
            "should have patchkit/recipes/wheel/CMakeLists.txt",
        ),
        (["patchkit/recipes/wheel/CMakeLists.txt", "tests/a.py"], "and not tests/a.py"),
    ],
)
def test_a_wheel_holds_the_package_its_recipes_and_nothing_else(tmp_path, names, wrong):
    members = dict.fromkeys((*(f"patchkit/{each}" for each in WANTED), *names), "")
    path = write_zip(tmp_path / "patchkit_gb10-1-py3-none-any.whl", members)
    with pytest.raises(ProofError, match=wrong) if wrong else nullcontext():
        check_wheel(path)


def test_every_lock_is_tested_and_fits_pyproject():
    assert {f"{name}.txt" for name in locks.LOCKS} == {
        file.name for file in (locks.ROOT / "requirements").iterdir()
    }
    assert locks.stale(locks.ROOT) == []


def test_a_lock_made_from_something_else_is_stale(tmp_path):
    shutil.copytree(locks.ROOT / "requirements", tmp_path / "requirements")
    text = (locks.ROOT / "pyproject.toml").read_text()
    for before in ('"click>=8.2"', "hatchling>=1.27", 'requires-python = ">=3.11.4"'):
        assert text.count(before) == 1
        (tmp_path / "pyproject.toml").write_text(
            text.replace(before, before.replace(">=", ">=9"))
        )
        assert locks.stale(tmp_path) == [*locks.LOCKS]
