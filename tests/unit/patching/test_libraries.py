"""Libraries of an installed package: replaced, kept on, and put back with their RECORD."""

from __future__ import annotations

import csv
import shlex
from functools import partial

import pytest

from patchkit.apply import commit_libraries, revert_libraries
from patchkit.digests import digest
from patchkit.errors import DriftError, HashMismatchError, StorageError
from patchkit.patching.forced_revert import ASIDE, revert_by_force
from patchkit.patching.ledger import journal_of
from patchkit.patching.workspace import locked_workspace, read_workspace
from patchkit.source.detect import detect_installed
from patchkit.target import targets
from support.faults import killed_everywhere
from support.wheels import record

HOME = "bits.and_bytes-1.0.dist-info"
A, B = "bits/lib a.so", "bits/_b.abi3.so"
STOCK = {A: b"\x7fELF a" * 900, B: b"\x7fELF b" * 900, f"{HOME}/METADATA": b"Version: 1.0\n"}
GB10, H200 = targets()["gb10"], targets()["h200"]


@pytest.fixture
def site(tmp_path):
    return installed(tmp_path / "site packages")


def installed(site):
    for path, data in {**STOCK, f"{HOME}/RECORD": record(HOME, STOCK)}.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)
        (site / path).chmod(0o755 if path == A else 0o644)
    return site


def opened(site):
    return locked_workspace(partial(detect_installed, site, "Bits_and.bytes"))


def write(site, target=GB10, **contents):
    """Replace A, B or both: ``write(site, a=b"new")``."""
    with opened(site) as workspace:
        libraries = {}
        for name, data in contents.items():
            path = {"a": A, "b": B}[name]
            assert workspace.upstream_library(path).read_bytes() == STOCK[path]
            libraries[path] = workspace.make_folder() / name
            libraries[path].write_bytes(data)
        return commit_libraries(workspace, libraries, target)


def revert(site):
    with opened(site) as workspace:
        return revert_libraries(workspace)


def files(site):
    found = (place for place in site.rglob("*") if place.is_file())
    return {str(p.relative_to(site)): (p.read_bytes(), p.stat().st_mode & 0o777) for p in found}


def test_libraries_are_replaced_one_after_the_other_and_all_put_back(site):
    stock, inode = files(site), (site / A).stat().st_ino
    assert write(site, a=b"for gb10") == (A,)
    kept = site / HOME / ".patchkit/originals" / A
    assert (kept.stat().st_ino, kept.stat().st_nlink) == (inode, 1)  # moved, not copied
    assert write(site, H200, a=b"for h200", b=b"B") == (B, A)

    found = files(site)
    assert (found[A], found[B]) == ((b"for h200", 0o755), (b"B", 0o644))
    workspace = read_workspace(detect_installed(site, "bits-and-bytes"))
    again, ledger = journal_of(workspace.tree, workspace.state).again, workspace.ledger
    assert shlex.split(again) == ["patchkit", "native", str(site), "--revert"]
    expected = {A: b"for h200", B: b"B"}
    assert ledger.libraries == {p: (digest(STOCK[p]), digest(d)) for p, d in expected.items()}
    assert (ledger.project, ledger.request.target) == ("bits-and-bytes", "h200")
    rows = {row[0]: row[2] for row in csv.reader((site / HOME / "RECORD").read_text().splitlines())}
    assert rows.keys() == found.keys()  # pip uninstalls all of it
    assert (rows[A], rows[B]) == ("8", "1")

    assert revert(site) == (B, A)
    assert files(site) == stock
    assert (revert(site), (site / A).stat().st_ino) == ((), inode)


@pytest.mark.parametrize("action", [partial(write, a=b"A", b=b"B"), revert])
def test_killed_at_any_moment_the_next_run_finds_all_or_nothing(action, site):
    stock = files(site)
    write(site, a=b"A", b=b"B")
    patched = files(site)
    before, after = (patched, stock) if action is revert else (stock, patched)

    def prepare():
        with opened(site):
            pass
        assert files(site) in (before, after)
        revert(site) if before is stock else write(site, a=b"A", b=b"B")
        assert files(site) == before

    assert sum(1 for _ in killed_everywhere(lambda: action(site), prepare)) > 30
    assert files(site) == after


def test_what_was_edited_or_damaged_is_refused_and_force_loses_nothing(site):
    stock, tree = files(site), detect_installed(site, "bits-and-bytes")
    write(site, a=b"A", b=b"B")
    (site / B).write_bytes(b"mine")
    found = files(site)
    for action in (write, revert):
        with pytest.raises(DriftError, match=f"^{B}: edited since patchkit wrote it"):
            action(site)
        assert files(site) == found
    assert revert_by_force(tree).moved == (B,)
    assert files(site) == stock | {f"{ASIDE}/{B}": (b"mine", 0o644)}

    write(site, a=b"A")
    kept = site / HOME / ".patchkit/originals" / A
    kept.write_bytes(b"damaged")
    found = files(site)
    for action in (partial(write, a=b"A2"), revert):
        with pytest.raises(HashMismatchError, match=f"{kept}: is not the original of {A}"):
            action(site)
        assert files(site) == found
    assert revert_by_force(tree).lost == (A,)
    assert (site / A).read_bytes() == b"A"


def test_a_library_that_changes_meanwhile_and_a_full_disk_leave_everything(
    site, small_disk, tmp_path
):
    new = tmp_path / "new"
    new.write_bytes(b"x" * 100_000)
    with opened(site) as workspace:
        (site / A).write_bytes(workspace.upstream_library(A).read_bytes() + b"installed anew")
        with pytest.raises(DriftError, match=f"^{A}: changed while patchkit was working"):
            commit_libraries(workspace, {A: new}, GB10)
    full = installed(small_disk("size=96k"))
    stock = files(full)
    with opened(full) as workspace, pytest.raises(StorageError, match="No space left on device; n"):
        commit_libraries(workspace, {A: new}, GB10)
    assert files(full) == stock
