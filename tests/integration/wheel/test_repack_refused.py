"""What `patchkit repack` does not take, and what an accident in it leaves: nothing."""

# ruff: noqa: F811  (fixtures that two files share are imported, and named as parameters)
from __future__ import annotations

import resource
import shutil
import signal

import pytest

from patchkit.errors import (
    DriftError,
    HashMismatchError,
    SourceError,
    StorageError,
    UsageError,
)  # fmt: skip
from patchkit.patching.fix import Request
from patchkit.target import targets
from patchkit.wheel.vllm.repack import repack_wheel
from patchkit.wheel.wheelhouse.verify import check_files
from support.faults import in_child, killed_everywhere
from support.repacking import found, house, known, quiet, run, workplace  # noqa: F401  (fixtures)
from support.selection import WHOLE
from support.vllm_wheels import FIX, NAME, PATCHED, sha256, vllm_wheel
from support.wheels import write_wheel


def locked(spec, **which):
    with found(spec, **which) as origin:
        return origin.locked


X86 = NAME.replace("aarch64", "x86_64")


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda p: p / "absent.whl", UsageError, "no such file"),
        (lambda p: write_wheel(p, "1.0", project="other"), SourceError, "of other, not of vllm"),
        (lambda p: vllm_wheel(p, name=X86), UsageError, "is for x86_64, not for aarch64"),
        (lambda p: "vllm==0.19.one", UsageError, "is not a version"),
        (lambda p: "vllm==9.9.9", SourceError, "is not among the releases"),
        (lambda p: "vllm==0.10.0", SourceError, "0.10.0 is not supported"),
        (lambda p: "vllm==0.15.1", SourceError, "wheels on the package index and no sdist"),
        (
            lambda p: vllm_wheel(p, name=NAME.replace("2_28", "2_31")),
            HashMismatchError,
            "but the lock says c8dde3c9af20",
        ),
        (
            lambda p: vllm_wheel(p, name=NAME.replace("0.19.1", "0.19.1+mine")),
            UsageError,
            "is not among upstream's wheels that this patchkit knows",
        ),
    ],
)
def test_what_is_not_taken(tmp_path, make, error, words):
    with pytest.raises(error) as caught:
        locked(make(tmp_path))
    assert words in str(caught.value)


def test_hashes_that_are_named(tmp_path):
    wheel = vllm_wheel(tmp_path)
    assert not locked(wheel, digest=sha256(wheel).upper())
    with pytest.raises(HashMismatchError, match="not 0000"):
        locked(wheel, digest="0" * 64)
    with pytest.raises(UsageError, match="64 hex digits"):
        locked(wheel, digest="abc")
    with pytest.raises(UsageError, match="--sha256 is for a file"):
        locked("vllm==0.25.1", digest="0" * 64)


def test_the_wheel_that_was_hashed_is_the_one_that_is_repacked(house, tmp_path):
    wheel, other = vllm_wheel(tmp_path), vllm_wheel(tmp_path / "other", libraries={})
    digest = sha256(wheel)
    with found(wheel, digest=digest) as origin:
        other.replace(wheel)
        done = repack_wheel(
            origin, Request(target=targets()["gb10"], only=frozenset({FIX})), house, report=quiet
        )
    assert (done.facts["source"], done.facts["cuda"]) == (f"sha256:{digest}", "13")
    assert check_files(house) == ()


def test_nothing_to_change(run, house, tmp_path):
    def done(members):
        members[PATCHED.path] = PATCHED.after.encode()

    with pytest.raises((UsageError, DriftError)):
        run(vllm_wheel(tmp_path, change=done))
    assert not house.exists()


@pytest.mark.e2e
@pytest.mark.releases  # before any change in the matrix, else before every third
def test_killed_at_any_change_of_the_disk(run, house, tmp_path):
    source = vllm_wheel(tmp_path)

    def clean():
        shutil.rmtree(house, ignore_errors=True)
        shutil.rmtree(tmp_path / "work", ignore_errors=True)

    run(source)  # what it imports and parses, no child has to do again
    kills = 0
    for number in killed_everywhere(lambda: run(source), clean, 1 if WHOLE else 3):
        kills = number
        if number % 7 == 0 and house.is_dir():
            run(source)
            assert check_files(house) == ()
    assert kills > 40
    assert check_files(house) == ()
    assert len(list(house.glob("*.whl"))) == 1


@pytest.mark.e2e
def test_a_full_disk_leaves_nothing(run, house, tmp_path):
    source = vllm_wheel(tmp_path)

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        run(source)

    assert in_child(limited) == StorageError.exit_code
    assert not house.exists() or not list(house.glob("*.whl"))
    assert not [path for path in (tmp_path / "work").iterdir() if path.is_dir()]
