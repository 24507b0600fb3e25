"""All or nothing, whatever happens: refusals, full disks, and being killed at any moment."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import signal
import subprocess
from pathlib import PurePosixPath

import pytest
from patchkit.patching.transaction import Change, commit, interrupted, locked, recover

from faults import EVENTS, in_child, kill, killed_everywhere
from patchkit.errors import BusyError, DriftError, SourceError, StorageError

LEDGER, ORIGINAL = ".patchkit/ledger.json", ".patchkit/originals/src/a.py"
# path → (contents, mode)
STOCK = {
    "bin/run": (b"#!/bin/sh\nold\n", 0o755),
    "src/a.py": (b"old = 1\n" * 900, 0o644),
    "src/b.py": (b"untouched\n", 0o600),
    "src/gone.sh": (b"gone\n", 0o644),
}
PATCHED = {
    "bin/run": (b"#!/bin/sh\nnew\n", 0o755),
    "src/a.py": (b"new = 2\n" * 1000, 0o644),
    "src/b.py": (b"untouched\n", 0o600),
    "src/new.py": (b"", 0o644),
    "src/newer.py": (b"newer\n", 0o644),
    LEDGER: (b"{}\n", 0o644),
    ORIGINAL: (b"old = 1\n" * 900, 0o644),
}
# Patched by another version of the recipe: files more and less, other texts, a new ledger.
REPATCHED = {
    **{path: PATCHED[path] for path in ("src/b.py", "src/new.py", ORIGINAL)},
    "bin/run": STOCK["bin/run"],
    "src/a.py": (b"new = 3\n", 0o644),
    "src/extra.py": (b"extra\n", 0o644),
    "src/gone.sh": (b"back again\n", 0o644),
    LEDGER: (b'{"v": 2}\n', 0o644),
}
WAYS = {
    "apply": (STOCK, PATCHED),
    "apply again": (PATCHED, REPATCHED),
    "revert": (PATCHED, STOCK),
}


def changes_between(before, after):
    def contents(tree, path):
        return tree[path][0] if path in tree else None

    pairs = {path: (contents(before, path), contents(after, path)) for path in {*before, *after}}
    return [Change(path, *pair) for path, pair in sorted(pairs.items()) if pair[0] != pair[1]]


def tree_of(files):
    """What ``snapshot`` says of a tree of these files."""
    folders = {str(parent) for path in files for parent in PurePosixPath(path).parents}
    return {**files, **dict.fromkeys(folders - {"."})}


def write_tree(root, files):
    shutil.rmtree(root, ignore_errors=True)
    for path, (data, mode) in files.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        place.chmod(mode)
    return root


def snapshot(root):
    """Every file with its contents and mode, and every folder (None)."""
    return {
        place.relative_to(root).as_posix(): (
            (place.read_bytes(), place.stat().st_mode & 0o777) if place.is_file() else None
        )
        for place in root.rglob("*")
    }


@pytest.fixture
def root(tmp_path):
    umask = os.umask(0o022)
    yield tmp_path / "tree"
    os.umask(umask)


@pytest.mark.parametrize("way", WAYS)
def test_commit(way, root):
    before, after = WAYS[way]
    write_tree(root, before)
    commit(root, root / ".patchkit", changes_between(before, after))
    assert snapshot(root) == tree_of(after)
    assert not interrupted(root / ".patchkit")
    assert recover(root, root / ".patchkit") is False
    assert snapshot(root) == tree_of(after)


def test_committing_nothing_leaves_nothing(root):
    write_tree(root, STOCK)
    commit(root, root / ".patchkit", [])
    assert snapshot(root) == tree_of(STOCK)


CHANGES = changes_between(STOCK, PATCHED)


@pytest.mark.parametrize(
    ("path", "data"),
    [("src/a.py", b"mine\n"), ("src/gone.sh", None), ("src/new.py", b"mine\n"), (LEDGER, b"\n")],
    ids=["edited", "missing", "in the way", "somebody else's ledger"],
)
def test_a_file_that_is_not_as_expected_stops_everything(path, data, root):
    write_tree(root, STOCK)
    place = root / path
    if data is None:
        place.unlink()
    else:
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(data)
    found = snapshot(root)
    with pytest.raises(DriftError, match=f"^{path}: changed while patchkit was working"):
        commit(root, root / ".patchkit", CHANGES)
    assert snapshot(root) == found


def test_a_read_only_file_stops_everything(root):
    files = {**STOCK, "src/gone.sh": (STOCK["src/gone.sh"][0], 0o555)}
    write_tree(root, files)
    with pytest.raises(StorageError, match=r"^src/gone\.sh: is read-only; nothing was changed"):
        commit(root, root / ".patchkit", CHANGES)
    assert snapshot(root) == tree_of(files)


@pytest.mark.parametrize("link", ["src", "src/gone.sh", ".patchkit"])
def test_a_link_stops_everything(link, root, tmp_path):
    write_tree(root, STOCK)
    (tmp_path / "theirs").mkdir()
    if (root / link).exists():
        (root / link).rename(tmp_path / "theirs" / "it")
    (root / link).symlink_to(tmp_path / "theirs" / "it")
    found = snapshot(tmp_path)
    with pytest.raises(SourceError, match=f"{link} is a symbolic link"):
        commit(root, root / ".patchkit", CHANGES)
    assert snapshot(tmp_path) == found


def test_an_io_error_in_the_middle_puts_everything_back(root):
    """The last file cannot be made: its folder's place is taken by a file."""
    files = {**STOCK, "src/gone.sh": (STOCK["src/gone.sh"][0], 0o750)}
    write_tree(root, files)
    blocked = Change("src/b.py/impossible", None, b"")
    with pytest.raises(StorageError, match="nothing was changed"):
        commit(root, root / ".patchkit", [*CHANGES, blocked])
    assert snapshot(root) == tree_of(files)


@pytest.mark.parametrize("limit", [0, 1, 4096, 7500])
def test_a_file_that_cannot_be_written_whole(limit, root):
    write_tree(root, STOCK)

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        commit(root, root / ".patchkit", CHANGES)

    assert in_child(limited) == StorageError.exit_code
    assert snapshot(root) == tree_of(STOCK)


def test_a_full_disk(small_disk):
    disk = small_disk("size=128k")
    root = write_tree(disk / "tree", STOCK)
    more = [Change(f"{number}.txt", None, b"x" * 8000) for number in range(9)]
    with pytest.raises(StorageError, match="No space left on device; nothing was changed"):
        commit(root, root / ".patchkit", [*CHANGES, *more])
    assert snapshot(root) == tree_of(STOCK)
    commit(root, root / ".patchkit", CHANGES)
    assert snapshot(root) == tree_of(PATCHED)


@pytest.mark.parametrize("way", WAYS)
def test_a_disk_that_fills_up_at_any_moment(way, small_disk):
    """A tmpfs counts inodes: each number allows one more file, link or folder than the last."""
    before, after = WAYS[way]
    for inodes in itertools.count(len(tree_of(before)) + 2):
        root = write_tree(small_disk(f"nr_inodes={inodes}") / "tree", before)
        refusal = refused(root, changes_between(before, after))
        if not refusal:
            break
        assert "No space left on device; nothing was changed" in refusal
        assert snapshot(root) == tree_of(before), f"{inodes} inodes"
    assert inodes > len(tree_of(before)) + 5
    assert snapshot(root) == tree_of(after)


def refused(root, changes):
    """Why the disk refused to take the changes, or nothing if it did."""
    try:
        commit(root, root / ".patchkit", changes)
    except StorageError as error:
        return error.what
    return ""


def test_a_disk_that_becomes_read_only(small_disk):
    disk = small_disk("size=1m")
    root = write_tree(disk / "tree", STOCK)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(StorageError, match="Read-only file system; nothing was changed"):
        commit(root, root / ".patchkit", CHANGES)
    assert recover(root, root / ".patchkit") is False
    assert snapshot(root) == tree_of(STOCK)

    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    stop_in_the_middle(root)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(StorageError, match="an interrupted commit is still unfinished"):
        recover(root, root / ".patchkit")
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert recover(root, root / ".patchkit") is True
    assert snapshot(root) == tree_of(PATCHED)


@pytest.mark.parametrize("way", WAYS)
def test_killed_at_any_moment(way, root):
    before, after = WAYS[way]
    state = root / ".patchkit"
    changes = changes_between(before, after)
    finished = []

    for number in killed_everywhere(
        lambda: commit(root, state, changes), lambda: write_tree(root, before)
    ):
        with locked(root):
            recover(root, state)
        now = snapshot(root)
        assert now in (tree_of(before), tree_of(after)), f"killed before change {number}"
        finished.append(now == tree_of(after))
        assert not interrupted(state)
        if not finished[-1]:
            commit(root, state, changes)
        assert recover(root, state) is False
        assert snapshot(root) == tree_of(after), f"killed before change {number}"

    # Up to some moment nothing has happened, from then on everything.
    assert finished == sorted(finished)
    assert {*finished} == {False, True}
    assert snapshot(root) == tree_of(after)


@pytest.mark.parametrize("limit", [0, 1, 700, 4096, 7500])
def test_killed_in_the_middle_of_a_write(limit, root):
    write_tree(root, STOCK)

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        commit(root, root / ".patchkit", CHANGES)

    assert in_child(limited) == -signal.SIGXFSZ
    assert (root / ".patchkit").is_dir()
    assert recover(root, root / ".patchkit") is False
    assert snapshot(root) == tree_of(STOCK)


@pytest.mark.parametrize("first", [0, 3, 6, 9])
def test_killed_again_while_finishing(first, root):
    """``first`` counts from the point of no return."""
    state = root / ".patchkit"

    def killed_once():
        stop_in_the_middle(root, first)
        assert interrupted(state)

    kills = 0
    for number in killed_everywhere(lambda: recover(root, state), killed_once):
        kills += 1
        recover(root, state)
        assert snapshot(root) == tree_of(PATCHED), f"killed before change {number}"
        assert recover(root, state) is False
    assert kills > 10
    assert snapshot(root) == tree_of(PATCHED)


def stop_in_the_middle(root, offset=6):
    """Apply, but be killed ``offset`` changes of the disk after the point of no return."""
    write_tree(root, STOCK)
    since = itertools.count()
    started = []

    def hook(event, arguments):
        if event == "os.rename" and str(arguments[1]).endswith("journal.json"):
            started.append(event)
        elif started and event in EVENTS and next(since) == offset:
            kill()

    code = in_child(lambda: commit(root, root / ".patchkit", CHANGES), hook)
    assert code == -signal.SIGKILL


@pytest.mark.parametrize("path", [change.path for change in CHANGES])
def test_a_file_edited_between_the_kill_and_the_next_run_is_not_lost(path, root):
    state = root / ".patchkit"
    stop_in_the_middle(root)
    left = snapshot(root)
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(b"mine\n")

    for _ in range(2):
        with pytest.raises(DriftError, match=f"^{path}: edited since an interrupted run"):
            recover(root, state)
        assert (root / path).read_bytes() == b"mine\n"
        assert interrupted(state)

    (root / path).unlink()
    if path in left:
        (root / path).write_bytes(left[path][0])
        (root / path).chmod(left[path][1])
    assert recover(root, state) is True
    assert snapshot(root) == tree_of(PATCHED)


def test_a_file_edited_in_mid_commit_is_not_lost_and_nothing_else_changes(root):
    """Somebody writes to the last file right after all files were found to be as expected."""
    write_tree(root, STOCK)
    last = CHANGES[-1].path

    def hook(event, arguments):
        if event == "os.rename" and str(arguments[1]).endswith("journal.json"):
            (root / last).write_bytes(b"mine\n")

    code = in_child(lambda: commit(root, root / ".patchkit", CHANGES), hook)

    assert code == DriftError.exit_code
    assert snapshot(root) == tree_of({**STOCK, last: (b"mine\n", 0o644)})


def test_one_writer_at_a_time(root):
    write_tree(root, STOCK)

    def attempt():
        with locked(root):
            pass

    with locked(root):
        assert in_child(attempt) == BusyError.exit_code
        with pytest.raises(BusyError, match="another patchkit is working on this tree"):
            attempt()
    assert in_child(attempt) == 0
    assert snapshot(root) == tree_of(STOCK)


def test_a_killed_writer_does_not_block_the_next_one(root):
    write_tree(root, STOCK)

    def killed():
        with locked(root):
            kill()

    assert in_child(killed) == -signal.SIGKILL
    with locked(root):
        commit(root, root / ".patchkit", CHANGES)
    assert snapshot(root) == tree_of(PATCHED)
