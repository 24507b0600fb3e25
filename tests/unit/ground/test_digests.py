"""What a folder is known by: everything in it that is upstream's, and nothing else."""

import os
import shutil

import pytest

from patchkit.digests import sha256_if_readable, tree_digest
from support import write_files


@pytest.fixture
def folder(tmp_path):
    paths = ("src/Makefile", "src/script.sh", "src/build/x")
    return write_files(tmp_path / "tree", {path: path for path in paths})


@pytest.mark.parametrize(
    "change",
    [
        lambda root: write_files(root, {"src/Makefile": "all: \n"}),
        lambda root: (root / "src/Makefile").unlink(),
        lambda root: (root / "src/script.sh").chmod(0o755),
        lambda root: (root / "src/link").symlink_to("Makefile"),
        lambda root: (root / "src/script.sh").rename(root / "src/other"),
        lambda root: write_files(root, {"src/build/x": "1"}),
    ],
)
def test_any_change_of_a_folder_shows(folder, change):
    before = tree_digest(folder)
    change(folder)
    assert before != tree_digest(folder)


def test_what_is_not_upstreams_does_not_count(folder, tmp_path):
    before = tree_digest(folder)
    copy = shutil.copytree(folder, tmp_path / "elsewhere", copy_function=shutil.copy)
    aside = (".git/HEAD", ".patchkit/ledger.json", "build/lib/libnccl.so", ".deps/x")
    write_files(copy, dict.fromkeys(aside, ""))
    assert tree_digest(copy) == before
    write_files(copy, {"deps/x": ""})
    assert tree_digest(copy) != before


def test_a_pipe_has_no_digest_and_nobody_waits_for_it(tmp_path):
    os.mkfifo(tmp_path / "wheel")
    assert sha256_if_readable(tmp_path / "wheel") == ""
