"""Replace one file: what lies in its place or beside it neither misleads a writer nor stops it."""

import os
import stat

import pytest

from patchkit.durable.atomic import continuing, replacing
from patchkit.errors import UsageError


def write(path, writer=replacing):
    with writer(path) as file:
        file.write(b"new")


@pytest.mark.parametrize("writer", [replacing, continuing])
def test_a_link_is_neither_cut_nor_followed(tmp_path, writer):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)

    with pytest.raises(UsageError, match=r"link: is a link to .*real"):
        write(link, writer)

    assert (link.readlink(), real.read_text()) == (real, "old")
    assert sorted(tmp_path.iterdir()) == [link, real]
    write(real, writer=replacing)
    assert (real.read_text(), stat.S_IMODE(real.stat().st_mode)) == ("new", 0o640)


@pytest.mark.parametrize(
    ("writer", "name"), [(replacing, ".h.env.x.part"), (continuing, ".h.env.partial")]
)
def test_a_fifo_named_like_a_part_keeps_nobody_waiting(tmp_path, writer, name):
    os.mkfifo(tmp_path / name)

    write(tmp_path / "h.env", writer)

    assert (tmp_path / "h.env").read_text() == "new"
