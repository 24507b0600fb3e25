"""Unpacking: good archives come out whole, bad ones are refused by name and leave nothing."""

import io
import stat
import tarfile

import pytest

from patchkit.errors import SourceError
from patchkit.source.archive import unpack
from support import read_files


def file(name, content=b"text\n", mode=0o644):
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), mode
    return info, content


def entry(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


def tar_of(path, *members):
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w:") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return path


def assert_refused(archive, dest, *words):
    """Refused with all of these words, and the disk is as it was."""
    before = read_files(dest.parent), set(dest.parent.rglob("*"))
    with pytest.raises(SourceError) as caught:
        unpack(archive, dest)
    assert (read_files(dest.parent), set(dest.parent.rglob("*"))) == before
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
def test_tar_becomes_the_tree_without_its_top_folder(tmp_path, name):
    link = entry("demo-1/src/soft", tarfile.SYMTYPE, "../README")
    archive, dest = tar_of(tmp_path / name, *GOOD, link), tmp_path / "tree"
    assert unpack(archive, dest) == dest
    assert read_files(dest) == UNPACKED | {"src/soft": b"hello"}
    assert (dest / "src/soft").is_symlink()
    assert (dest / "tools/run.sh").stat().st_mode & stat.S_IXUSR
    assert not (dest / "README").stat().st_mode & stat.S_IXUSR
    assert {path.name for path in tmp_path.iterdir()} == {name, "tree"}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (file("demo-1/../../evil"), "leads out"),
        (file("/tmp/evil"), "leads out"),
        (file("other-2/evil"), "beside the top-level folder 'demo-1'"),
        (file("evil"), "beside the top-level folder"),
        (file("demo-1/README"), "twice"),
        (file("demo-1/README/evil"), "lies inside another member"),
        (file("demo-1/way/evil"), "lies inside another member"),
        (entry("demo-1/README", tarfile.DIRTYPE), "lies inside another member"),
        (entry("demo-1/pipe", tarfile.FIFOTYPE), "neither a file, a folder nor"),
        (entry("demo-1/null", tarfile.CHRTYPE), "neither a file, a folder nor"),
        (entry("demo-1/evil", tarfile.SYMTYPE, "../../etc"), "'../../etc'"),
        (entry("demo-1/evil", tarfile.SYMTYPE, "/etc/passwd"), "'/etc/passwd'"),
        (entry("demo-1/src/evil", tarfile.SYMTYPE, "../.."), "out of the tree"),
        # As text it stays inside; on disk 'way' is the root, and it does not.
        (entry("demo-1/evil", tarfile.SYMTYPE, "src/way/../.."), "out of the tree"),
        (
            entry("demo-1/evil", tarfile.LNKTYPE, "demo-1/README"),
            "a hard link or the like",
        ),
    ],
)
def test_bad_member_is_named(tmp_path, bad, words):
    way = entry("demo-1/way", tarfile.SYMTYPE, ".")
    archive = tar_of(tmp_path / "bad.tar.gz", *GOOD, way, bad)
    assert_refused(archive, tmp_path / "tree", repr(bad[0].name), words, "bad.tar.gz")


@pytest.mark.parametrize("kept", [0.02, 0.5, 0.99])
def test_truncated_gzip(tmp_path, kept):
    noise = bytes(i * i % 251 for i in range(50_000))
    archive = tar_of(tmp_path / "bad.tar.gz", *GOOD, file("demo-1/z", noise))
    whole = archive.read_bytes()
    archive.write_bytes(whole[: int(len(whole) * kept)])
    assert_refused(
        archive, tmp_path / "tree", "bad.tar.gz cannot be unpacked", "cut short"
    )


def test_destination_that_is_taken(tmp_path):
    archive = tar_of(tmp_path / "a.tar.gz", *GOOD)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "mine").write_text("mine")
    assert_refused(archive, tmp_path / "tree", "already there")
