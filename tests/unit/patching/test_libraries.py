"""Libraries of an installed package: replaced, kept on, and put back with their RECORD."""

import shlex
from functools import partial
from pathlib import Path

import pytest

from patchkit.apply import commit_libraries, revert_libraries
from patchkit.digests import digest
from patchkit.errors import BusyError, DriftError, HashMismatchError, StorageError
from patchkit.patching.forced_revert import ASIDE, revert_by_force
from patchkit.patching.workspace import journal_of, locked_workspace, read_workspace
from patchkit.source.detect import detect_installed
from patchkit.target import targets
from patchkit.wheel.native.installed import revert_installed
from patchkit.wheel.native.make import list_installed
from support import write_files
from support.faults import killed_everywhere
from support.wheels import record

HOME = "bits.and_bytes-1.0.dist-info"
A, B = "bits/lib a.so", "bits/_b.abi3.so"
PTX = Path(__file__).parents[2] / "data/libraries/ptx-aarch64.so"
META = b"Name: bits.and_bytes\nVersion: 1.0\n"
STOCK = {A: PTX.read_bytes(), B: b"\x7fELF b" * 900, f"{HOME}/METADATA": META}
BOTH, GB10 = {A: b"A", B: b"B"}, targets()["gb10"]


@pytest.fixture
def site(tmp_path):
    return installed(tmp_path / "site packages")


def installed(site):
    write_files(site, {**STOCK, f"{HOME}/RECORD": record(HOME, STOCK)})
    (site / A).chmod(0o755)
    return site


def opened(site):
    return locked_workspace(partial(detect_installed, site, "Bits_and.bytes"))


def write(site, contents=BOTH, target=GB10):
    with opened(site) as workspace:
        for number, (path, data) in enumerate(contents.items()):
            assert workspace.upstream_library(path).read_bytes() == STOCK[path]
            (workspace.make_folder() / str(number)).write_bytes(data)
        libraries = {
            p: workspace.make_folder() / str(n) for n, p in enumerate(contents)
        }
        return commit_libraries(workspace, libraries, target)


def revert(site):
    with opened(site) as workspace:
        return revert_libraries(workspace)


def files(site):
    found = (place for place in site.rglob("*") if place.is_file())
    return {
        str(p.relative_to(site)): (p.read_bytes(), p.stat().st_mode & 0o777)
        for p in found
    }


def test_libraries_are_replaced_one_after_the_other_and_all_put_back(site):
    stock, inode = files(site), (site / A).stat().st_ino
    assert [library.name for library in list_installed(site, GB10)] == [A]
    assert write(site, {A: b"for gb10"}) == (A,)
    kept = site / HOME / ".patchkit/originals" / A
    assert (kept.stat().st_ino, kept.stat().st_nlink) == (inode, 1)  # moved, not copied
    assert write(site, BOTH, targets()["h200"]) == (B, A)

    found = files(site)
    assert (found[A], found[B]) == ((b"A", 0o755), (b"B", 0o644))
    workspace = read_workspace(detect_installed(site, "bits-and-bytes"))
    again, ledger = journal_of(workspace.tree, workspace.state).again, workspace.ledger
    assert shlex.split(again) == ["patchkit", "native", str(site), "--revert"]
    assert ledger.libraries == {
        p: (digest(STOCK[p]), digest(new)) for p, new in BOTH.items()
    }
    assert (ledger.project, ledger.request.target) == ("bits-and-bytes", "h200")
    rows = (site / HOME / "RECORD").read_text().splitlines()
    assert {row.split(",")[0] for row in rows} == {*found}  # pip uninstalls all of it
    assert {*record(HOME, BOTH).decode().splitlines()} <= {*rows}
    assert not [
        *list_installed(site, GB10)
    ]  # an original is none of the package's libraries
    assert revert_installed(site) == {"bits-and-bytes": (B, A)}
    assert files(site) == stock
    assert (revert(site), (site / A).stat().st_ino) == ((), inode)


@pytest.mark.parametrize("action", [write, revert])
def test_killed_at_any_moment_the_next_run_finds_all_or_nothing(action, site):
    back = write if action is revert else revert
    found = [files(site), write(site) and files(site)]
    before, after = found if action is write else found[::-1]

    def prepare():
        with opened(site):
            assert files(site) in found
        back(site)
        assert files(site) == before

    assert sum(1 for _ in killed_everywhere(lambda: action(site), prepare)) > 30
    assert files(site) == after


def assert_refused(site, error, match):
    found = files(site)
    for action in (write, revert):
        with pytest.raises(error, match=match):
            action(site)
        assert files(site) == found


def test_what_was_edited_or_damaged_is_refused_and_force_loses_nothing(site):
    stock, tree = files(site), detect_installed(site, "bits-and-bytes")
    write(site)
    (site / B).write_bytes(b"mine")
    assert_refused(site, DriftError, f"^{B}: edited since patchkit wrote it")
    assert revert_by_force(tree).moved == [B]
    assert files(site) == stock | {f"{ASIDE}/{B}": (b"mine", 0o644)}
    write(site, {A: b"A"})
    kept = site / HOME / ".patchkit/originals" / A
    kept.write_bytes(b"damaged")
    assert_refused(site, HashMismatchError, f"{kept}: is not the original of {A}")
    assert (revert_by_force(tree).lost, (site / A).read_bytes()) == ([A], b"A")


def test_a_library_that_changes_meanwhile_and_a_full_disk(site, small_disk, tmp_path):
    new = tmp_path / "new"
    new.write_bytes(b"x" * 100_000)
    with opened(site) as workspace:
        (site / A).write_bytes(
            workspace.upstream_library(A).read_bytes() + b"installed anew"
        )
        with pytest.raises(BusyError):
            write(site)
        with pytest.raises(
            DriftError, match=f"^{A}: changed while patchkit was working"
        ):
            commit_libraries(workspace, {A: new}, GB10)
    full = installed(small_disk("size=96k"))
    stock = files(full)
    with (
        opened(full) as workspace,
        pytest.raises(StorageError, match="No space left on device; n"),
    ):
        commit_libraries(workspace, {A: new}, GB10)
    assert files(full) == stock
