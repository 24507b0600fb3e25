"""Unpacking: good archives come out whole, bad ones are refused by name and leave nothing."""

from __future__ import annotations

import io
import stat
import tarfile
from pathlib import Path

import pytest

from patchkit.errors import SourceError
from patchkit.source.archive import unpack


def file(name: str, content: bytes = b"text\n", mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    info.mode = mode
    return info, content


def entry(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info, b""


def tar_of(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w:") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return path


def contents(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def assert_refused(archive: Path, dest: Path, *words: str) -> None:
    """Refused with all of these words, and the disk is as it was."""
    before = contents(dest.parent), set(dest.parent.rglob("*"))
    with pytest.raises(SourceError) as caught:
        unpack(archive, dest)
    assert (contents(dest.parent), set(dest.parent.rglob("*"))) == before
    for word in words:
        assert word in str(caught.value)


GOOD = (
    entry("demo-1", tarfile.DIRTYPE),
    file("demo-1/README", b"hello"),
    file("demo-1/tools/run.sh", b"#!/bin/sh\n", mode=0o755),
    file("demo-1/src/a.py", b"a = 1\n"),
)
UNPACKED = {"README": b"hello", "tools/run.sh": b"#!/bin/sh\n", "src/a.py": b"a = 1\n"}


@pytest.mark.parametrize("name", ["demo-1.tar.gz", "demo-1.tar"])
def test_tar_becomes_the_tree_without_its_top_folder(tmp_path: Path, name: str) -> None:
    archive = tar_of(tmp_path / name, *GOOD)
    dest = tmp_path / "tree"
    assert unpack(archive, dest) == dest
    assert contents(dest) == UNPACKED
    assert (dest / "tools/run.sh").stat().st_mode & stat.S_IXUSR
    assert not (dest / "README").stat().st_mode & stat.S_IXUSR
    assert {path.name for path in tmp_path.iterdir()} == {name, "tree"}


def test_links_inside_the_tree_are_kept(tmp_path: Path) -> None:
    archive = tar_of(
        tmp_path / "a.tar.gz",
        file("demo-1/a", b"hello"),
        entry("demo-1/sub/soft", tarfile.SYMTYPE, "../a"),
    )
    dest = unpack(archive, tmp_path / "tree")
    assert (dest / "sub/soft").is_symlink()
    assert (dest / "sub/soft").read_bytes() == b"hello"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (file("demo-1/../../evil"), "leads out"),
        (file("/tmp/evil"), "leads out"),
        (file("other-2/evil"), "beside the top-level folder 'demo-1'"),
        (file("evil"), "beside the top-level folder"),
        (file("demo-1/README"), "twice"),
        (file("demo-1/README/evil"), "lies inside another member"),
        (entry("demo-1/README", tarfile.DIRTYPE), "lies inside another member"),
        (entry("demo-1/pipe", tarfile.FIFOTYPE), "neither a file, a folder nor"),
        (entry("demo-1/null", tarfile.CHRTYPE), "neither a file, a folder nor"),
        (entry("demo-1/evil", tarfile.SYMTYPE, "../../etc"), "'../../etc'"),
        (entry("demo-1/evil", tarfile.SYMTYPE, "/etc/passwd"), "'/etc/passwd'"),
        (entry("demo-1/src/evil", tarfile.SYMTYPE, "../.."), "out of the tree"),
        (entry("demo-1/src/evil", tarfile.SYMTYPE, "../src/../../x"), "out of the tree"),
        (entry("demo-1/evil", tarfile.LNKTYPE, "demo-1/README"), "a hard link or the like"),
    ],
)
def test_bad_member_is_named(
    tmp_path: Path, bad: tuple[tarfile.TarInfo, bytes], words: str
) -> None:
    archive = tar_of(tmp_path / "bad.tar.gz", *GOOD, bad)
    assert_refused(archive, tmp_path / "tree", repr(bad[0].name), words, "bad.tar.gz")


def test_link_that_is_only_dangerous_behind_another_link(tmp_path: Path) -> None:
    # As text, 'deep/up/../..' stays inside; on disk 'deep/up' is the root, and it does not.
    archive = tar_of(
        tmp_path / "bad.tar.gz",
        file("demo-1/deep/a"),
        entry("demo-1/evil", tarfile.SYMTYPE, "deep/up/../.."),
        entry("demo-1/deep/up", tarfile.SYMTYPE, ".."),
    )
    assert_refused(archive, tmp_path / "tree", "'demo-1/evil'")


def test_file_written_through_a_link(tmp_path: Path) -> None:
    archive = tar_of(
        tmp_path / "bad.tar.gz",
        entry("demo-1/way", tarfile.SYMTYPE, "."),
        file("demo-1/way/evil"),
    )
    assert_refused(archive, tmp_path / "tree", "'demo-1/way/evil'")


@pytest.mark.parametrize("kept", [0.02, 0.5, 0.99])
def test_truncated_gzip(tmp_path: Path, kept: float) -> None:
    noise = bytes(i * i % 251 for i in range(50_000))
    archive = tar_of(tmp_path / "bad.tar.gz", *GOOD, file("demo-1/z", noise))
    whole = archive.read_bytes()
    archive.write_bytes(whole[: int(len(whole) * kept)])
    assert_refused(archive, tmp_path / "tree", "bad.tar.gz cannot be unpacked", "cut short")


@pytest.mark.parametrize("occupant", ["folder", "file"])
def test_destination_that_is_taken(tmp_path: Path, occupant: str) -> None:
    archive = tar_of(tmp_path / "a.tar.gz", *GOOD)
    dest = tmp_path / "tree"
    if occupant == "folder":
        dest.mkdir()
    (dest / "mine" if occupant == "folder" else dest).write_text("mine")
    assert_refused(archive, dest, "already there")
