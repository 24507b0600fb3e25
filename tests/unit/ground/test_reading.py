"""Files of others: regular, bounded and UTF-8, or an error at once."""

import gzip
import os
import socket
from pathlib import Path

import pytest

from patchkit.errors import SourceError, StorageError, UsageError
from patchkit.reading import (
    LARGEST,
    read_bytes,
    read_chunks,
    read_text,
    require_file,
    user_path,
)


def _socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (Path.mkdir, UsageError, "is a directory, not a file"),
        (os.mkfifo, UsageError, "is a FIFO, not a file"),
        (_socket, StorageError, "cannot be read"),
        (lambda path: path.symlink_to("nowhere"), UsageError, "no such file"),
        (lambda path: path.symlink_to(path.name), UsageError, "is a symbolic link"),
    ],
)
def test_what_is_no_file_is_refused_at_once(make, kind, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    path = Path("x")
    make(path)
    with pytest.raises(kind, match=rf"^x: .*{says}"):
        read_bytes(path)


def test_devices_and_paths_that_lead_nowhere():
    for path in ("/dev/zero", "with\0nul", "/etc/hostname/below"):
        with pytest.raises(UsageError):
            read_text(Path(path))
        with pytest.raises(UsageError):
            require_file(Path(path), "name another")


def test_a_link_is_followed_where_a_user_named_it_and_not_in_a_tree(tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    assert read_text(tmp_path / "link") == "text"
    with pytest.raises(UsageError, match="is a symbolic link, not a file"):
        read_text(tmp_path / "link", follow=False)


def test_the_limit_is_the_last_size_that_is_read_and_a_line_that_is_not_utf8_is_named(
    tmp_path,
):
    path = tmp_path / "file"
    path.write_bytes(b"a" * 10)
    assert read_bytes(path, limit=10) == b"a" * 10
    with pytest.raises(SourceError, match="is larger than 9 bytes"):
        read_bytes(path, limit=9)
    os.truncate(path, 1 << 40)  # a hole: nothing of it is on the disk
    with pytest.raises(SourceError, match="is larger than 4 MiB"):
        read_bytes(path)
    assert LARGEST == 4 << 20
    path.write_bytes(b"one\ntwo\n\xff\n")
    with pytest.raises(SourceError, match=r"file:3: is not UTF-8"):
        read_text(path)


def test_a_compressed_file_is_refused_with_what_unpacks_it(tmp_path):
    (tmp_path / "old.log").write_bytes(gzip.compress(b"text"))
    with pytest.raises(
        SourceError, match=r"old\.log: is compressed with gzip"
    ) as caught:
        list(read_chunks(tmp_path / "old.log", reader="wc -l"))
    assert caught.value.hint == f"zcat {tmp_path}/old.log | wc -l"


def test_a_path_of_an_unknown_user_stays_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/venv") == tmp_path / "venv"
    assert user_path("~no-such-user/venv") == Path("~no-such-user/venv")
