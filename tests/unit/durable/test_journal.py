"""The journal: what it refuses, what it believes of one that lies there, and what it says.

That it holds at every system call is shown by tests/e2e/torture.
"""

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import PurePosixPath

import pytest

from patchkit.digests import digest
from patchkit.durable.journal import Change, Journal
from patchkit.durable.lock import locked
from patchkit.errors import BusyError, DriftError, SourceError, StorageError
from support import write_files
from support.faults import EVENTS, in_child, kill

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
ALL = sorted({*STOCK, *PATCHED})


def changes_between(before, after):
    nothing = (None, 0)
    pairs = {
        path: (before.get(path, nothing)[0], after.get(path, nothing)[0])
        for path in ALL
    }
    return [
        Change(path, digest(old), new)
        for path, (old, new) in pairs.items()
        if old != new
    ]


CHANGES = changes_between(STOCK, PATCHED)


def tree_of(files):
    """What ``snapshot`` says of a tree of these files."""
    folders = {str(parent) for path in files for parent in PurePosixPath(path).parents}
    return {**files, **dict.fromkeys(folders - {"."})}


def write_tree(root, files):
    shutil.rmtree(root, ignore_errors=True)
    for path, (data, mode) in files.items():
        write_files(root, {path: data}, mode)
    return root


def snapshot(root):
    """Every file with its contents and mode, and every folder (None)."""
    return {
        place.relative_to(root).as_posix(): (
            (place.read_bytes(), place.stat().st_mode & 0o777)
            if place.is_file()
            else None
        )
        for place in root.rglob("*")
    }


def journal_of(root):
    state = root / ".patchkit"
    return Journal(
        root=root, folder=state / "transaction", home=state, again="again", rescue="sos"
    )


@pytest.fixture
def root(tmp_path):
    umask = os.umask(0o022)
    yield write_tree(tmp_path / "tree", STOCK)
    os.umask(umask)


@pytest.fixture
def journal(root):
    return journal_of(root)


# What it refuses


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("src/a.py", b"mine\n"),
        ("src/gone.sh", None),
        ("src/new.py", b"mine\n"),
        (LEDGER, b"\n"),
    ],
    ids=["edited", "missing", "in the way", "somebody else's ledger"],
)
def test_a_file_that_is_not_as_expected_stops_everything(path, data, root, journal):
    (root / path).unlink(missing_ok=True)
    if data is not None:
        write_files(root, {path: data})
    found = snapshot(root)
    with pytest.raises(
        DriftError, match=f"^{path}: changed while patchkit was working"
    ):
        journal.commit(CHANGES)
    assert snapshot(root) == found


@pytest.mark.parametrize("link", ["src", "src/gone.sh", ".patchkit"])
def test_a_link_stops_everything(link, root, journal, tmp_path):
    """Also where patchkit's own folder is one: nothing behind it is deleted."""
    theirs = tmp_path / "theirs" / "it"
    (theirs.parent / "precious" / "empty").mkdir(parents=True)
    if (root / link).exists():
        (root / link).rename(theirs)
    else:
        (theirs / "transaction" / "after").mkdir(parents=True)
        (theirs / "empty").mkdir()
    (root / link).symlink_to(theirs)
    found = snapshot(tmp_path)
    actions = [lambda: journal.commit(CHANGES)]
    for action in [*actions, journal.recover] if link == ".patchkit" else actions:
        with pytest.raises(SourceError, match=f"{link} is a symbolic link"):
            action()
    assert snapshot(tmp_path) == found


def test_another_disk_below_the_root(root, journal, small_disk):
    """A folder of the tree is a mount: its files cannot be renamed from outside."""
    disk = small_disk("size=1m")
    (disk / "b.py").write_bytes(b"old\n")
    (root / "src" / "disk").mkdir()
    subprocess.run(["mount", "--bind", str(disk), str(root / "src/disk")], check=True)
    try:
        with pytest.raises(StorageError, match="lies on another file system"):
            journal.commit([Change("src/disk/b.py", digest(b"old\n"), b"new\n")])
        assert (disk / "b.py").read_bytes() == b"old\n"
    finally:
        subprocess.run(["umount", str(root / "src/disk")], check=True)


def test_one_writer_at_a_time(root, journal):
    def attempt():
        with locked(root):
            pass

    def killed():
        with locked(root):
            kill()

    with locked(root):
        assert in_child(attempt) == BusyError.exit_code
        with pytest.raises(BusyError, match="another patchkit is working on this tree"):
            attempt()
    assert in_child(killed) == -signal.SIGKILL
    with locked(root):
        journal.commit(CHANGES)
    assert snapshot(root) == tree_of(PATCHED)


def test_a_way_back_that_fails_keeps_the_journal_and_says_what_is_changed(
    root, journal
):
    """The disk fails in the middle; the way back is closed by a folder where no file was."""

    def hook(event, arguments):
        if event == "os.remove" and str(arguments[0]).endswith("src/gone.sh"):
            (root / "src/new.py").mkdir()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def fail():
        with pytest.raises(StorageError) as caught:
            journal.commit(CHANGES)
        said = str(caught.value)
        assert "error; and taking it back failed, too" in said
        assert (
            "0 of 7 files changed; unknown: src/new.py; the rest is as before" in said
        )
        assert "next: once the cause is mended: again" in said
        assert "nothing was changed" not in said

    assert in_child(fail, hook) == 0
    (root / "src/new.py").rmdir()
    journal.recover()
    assert snapshot(root) == tree_of(STOCK)


# What lies there afterwards


def stop_in_the_middle(root, offset=6):
    """Apply, but be killed ``offset`` changes of the disk after the point of no return."""
    since, started = itertools.count(), []

    def hook(event, arguments):
        if event == "os.rename" and str(arguments[1]).endswith("back.json"):
            started.append(event)
        elif started and event in EVENTS and next(since) == offset:
            kill()

    assert in_child(lambda: journal_of(root).commit(CHANGES), hook) == -signal.SIGKILL


@pytest.mark.parametrize("path", ["src/a.py", "src/newer.py"])
def test_a_file_edited_between_the_kill_and_the_next_run_is_not_lost(
    path, root, journal
):
    stop_in_the_middle(root)
    left = snapshot(root)
    write_files(root, {path: "mine\n"})
    for _ in range(2):
        with pytest.raises(
            DriftError, match=f"^{path}: edited since an interrupted run"
        ):
            journal.recover()
        assert (root / path).read_bytes() == b"mine\n"
        with pytest.raises(StorageError, match="cut short in mid-commit"):
            journal.check_finished()
    (root / path).unlink()
    if path in left:
        (root / path).write_bytes(left[path][0])
        (root / path).chmod(left[path][1])
    journal.recover()
    assert snapshot(root) == tree_of(STOCK)


def test_a_file_edited_in_mid_commit_is_not_lost_and_nothing_else_changes(
    root, journal
):
    """Somebody writes to the last file right after all files were found to be as expected."""
    last = CHANGES[-1].path

    def hook(event, arguments):
        if event == "os.rename" and str(arguments[1]).endswith("back.json"):
            (root / last).write_bytes(b"mine\n")

    assert in_child(lambda: journal.commit(CHANGES), hook) == DriftError.exit_code
    assert snapshot(root) == tree_of({**STOCK, last: (b"mine\n", 0o644)})


def test_an_original_that_is_damaged_is_not_put_back(root, journal):
    stop_in_the_middle(root, offset=8)
    for place in (journal.folder / "before").iterdir():
        place.unlink()  # it is a second name of a file of the tree
        place.write_bytes(b"garbage")
    found = snapshot(root)
    with pytest.raises(StorageError, match="is damaged or gone") as caught:
        journal.recover()
    assert caught.value.hint == "sos"
    assert snapshot(root) == found


def _damage(change):
    def damage(place, table):
        change(table)
        place.write_text(json.dumps(table))

    return damage


DAMAGED = {
    "empty": lambda place, _: place.write_bytes(b""),
    "deep": lambda place, _: place.write_text("[" * 100_000),
    "a field less": _damage(lambda table: table["steps"][0].pop("after")),
    "above": _damage(lambda table: table["steps"][0].update(path="../x")),
    "NUL": _damage(lambda table: table["steps"][0].update(path="a\0b")),
    "twice": _damage(lambda table: table["steps"].append(table["steps"][0])),
    "no sum": _damage(lambda table: table["steps"][0].update(after="abc")),
    "a link": lambda place, _: (place.unlink(), place.symlink_to("/dev/zero")),
    "a device": lambda place, _: (place.unlink(), os.mkfifo(place)),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_journal_is_told_with_a_way_out(how, root, journal):
    stop_in_the_middle(root)
    place = journal.folder / "back.json"
    DAMAGED[how](place, json.loads(place.read_text()))
    found = snapshot(root / "src")
    with pytest.raises(StorageError, match="cannot be understood") as caught:
        journal.recover()
    assert caught.value.hint == "sos"
    assert snapshot(root / "src") == found


def test_only_names_that_are_allowed(root):
    """A journal that somebody put there removes and replaces nothing else."""
    stop_in_the_middle(root)
    journal = replace(journal_of(root), allowed=lambda path: "/" not in path)
    found = snapshot(root)
    with pytest.raises(StorageError, match="is not a file that patchkit changes here"):
        journal.recover()
    assert snapshot(root) == found
