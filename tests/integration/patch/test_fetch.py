"""Fetching from a package index: a real one, served from this machine, with a small sdist."""

from __future__ import annotations

import hashlib
import io
import tarfile
from dataclasses import replace
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import ClassVar

import pytest
import requests

from patchkit.errors import HashMismatchError, SourceError, StorageError
from patchkit.patching.recipe import load_recipe
from patchkit.source.archive import unpack
from patchkit.source.fetch import CHUNK, fetch, index_session
from patchkit.source.releases import LockEntry, read_lock, read_wheel_lock
from support import write_files
from support.local_server import LocalServer, QuietHandler
from tools.index_entries import render_lock

NAME = "demo-1.0.tar.gz"
COMMITTED_LOCK = Path(__file__).parents[3] / "recipes" / "vllm" / "lock.toml"


class Handler(QuietHandler, SimpleHTTPRequestHandler):
    """Serves files; refuses the project "locked", and cuts off what ends in ".cut".

    A file in parts/ is sent from the byte on that is asked for, one in whole/ never is.
    """

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        Handler.asked.append(self.headers.get("Range", ""))
        start = int(Handler.asked[-1].removeprefix("bytes=").removesuffix("-") or 0)
        if self.path.startswith("/simple/locked/"):
            self.send_error(401)
        elif self.path.startswith("/parts/") and start:
            data = Path(self.translate_path(self.path)).read_bytes()
            self.send_response(206 if start < len(data) else 416)
            self.send_header(
                "Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}"
            )
            self.end_headers()
            self.wfile.write(data[start:])
        elif self.path.endswith(".cut"):
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            self.wfile.write(b"only this" * (CHUNK // 4))
        else:
            super().do_GET()


@cache  # gzip writes the time into it
def sdist() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        info = tarfile.TarInfo("demo-1.0/PKG-INFO")
        content = b"Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n"
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


class Index(LocalServer):
    def __init__(self, folder: Path) -> None:
        super().__init__(partial(Handler, directory=str(folder)))
        self.folder, self.address = folder, f"127.0.0.1:{self.server_port}"
        self.entry = LockEntry(
            version="1.0",
            filename=NAME,
            sha256=hashlib.sha256(sdist()).hexdigest(),
            size=len(sdist()),
        )
        self.lock = {"1.0": self.entry}

    def stop(self) -> None:
        self.__exit__()

    def offer(self, href: str) -> None:
        """Make the page of the project offer the sdist at ``href``."""
        link = f'<a href="{href}#sha256={self.entry.sha256}">{NAME}</a>'
        page = f"<!DOCTYPE html><html><body>{link}</body></html>"
        write_files(self.folder, {"simple/demo/index.html": page})


@pytest.fixture
def index(tmp_path, monkeypatch):
    write_files(tmp_path / "index/files", {NAME: sdist()})
    monkeypatch.setenv("PATCHKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Index(tmp_path / "index") as served:
        served.offer(f"../../files/{NAME}")
        monkeypatch.setenv("PIP_INDEX_URL", f"{served.url}/simple/")
        yield served


def cached(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache" / "sdists").iterdir())


def test_fetch_verifies_and_caches(index, tmp_path):
    seen = []
    path = fetch(
        "demo",
        "1.0",
        index.lock,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert path == tmp_path / "cache/sdists" / NAME
    assert path.read_bytes() == sdist()
    assert seen[-1] == (index.entry.size, index.entry.size)
    assert (unpack(path, tmp_path / "tree") / "PKG-INFO").is_file()

    path.write_bytes(sdist()[:-1])  # a corrupt one is mended
    assert fetch("demo", "1.0", index.lock).read_bytes() == sdist()
    assert cached(tmp_path) == [NAME]

    index.stop()
    assert fetch("demo", "1.0", index.lock) == path
    assert fetch("demo", "1.0", index.lock, offline=True) == path
    with pytest.raises(SourceError, match=r"2\.0 is not among the releases"):
        fetch("demo", "2.0", index.lock)


@pytest.mark.parametrize("change", [{"sha256": "0" * 64}, {"size": 5}, {"size": 10**6}])
def test_download_that_is_not_what_the_lock_says(index, tmp_path, change):
    entry = replace(index.entry, **change)
    with pytest.raises(HashMismatchError, match=NAME) as caught:
        fetch("demo", "1.0", {"1.0": entry})
    assert entry.sha256 in str(caught.value)
    assert index.entry.sha256 in str(caught.value)
    assert cached(tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ("parts", b"begun"),
        ("parts", b"damaged"),
        ("parts", b"longer"),
        ("whole", b"begun"),
    ],
)
def test_a_download_goes_on_where_it_was_cut(index, tmp_path, kind, left):
    data = sdist()
    write_files(index.folder / kind, {NAME: data})
    index.offer(f"../../{kind}/{NAME}")
    begun = {b"begun": data[:100], b"damaged": b"x" * 100, b"longer": data + b"x"}[left]
    write_files(tmp_path / "cache/sdists", {f".{NAME}.partial": begun})
    Handler.asked.clear()

    assert fetch("demo", "1.0", index.lock).read_bytes() == data

    assert cached(tmp_path) == [NAME]
    ranges = [each for each in Handler.asked if each]
    assert ranges == (["bytes=100-"] if len(begun) == 100 else [])


def test_what_a_cut_download_brought_is_kept(index, tmp_path):
    part = tmp_path / "cache/sdists" / f".{NAME}.partial"
    index.offer("../../files/demo.cut")
    with pytest.raises(StorageError, match=r"the connection to .* failed"):
        fetch("demo", "1.0", {"1.0": replace(index.entry, size=10**6)})
    assert part.read_bytes() == (b"only this" * CHUNK)[: 2 * CHUNK]
    assert part.stat().st_mode & 0o077 == 0
    index.offer(f"../../files/{NAME}")
    fetch("demo", "1.0", index.lock)
    assert cached(tmp_path) == [NAME]


@pytest.mark.parametrize("project", ["demo", "absent", "locked"])
def test_credentials_are_used_but_never_told(index, project, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:s3cret@{index.address}/simple/")
    index.offer("../../files/absent.tar.gz")
    with pytest.raises(StorageError, match=index.address) as caught:
        fetch(project, "1.0", index.lock)
    assert "s3cret" not in str(caught.value)
    assert "me:" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "gets_login"),
    [
        ("https://index.test/other/f.whl", True),
        ("https://index.test:443/f.whl", True),
        ("https://index.test:8443/f.whl", False),
        ("http://index.test/f.whl", False),
        ("http://index.test:443/f.whl", False),
        ("https://files.index.test/f.whl", False),
        ("http://[::1]:8080/f.whl", True),
        ("http://[::1]:8081/f.whl", False),
    ],
)
def test_a_login_goes_to_no_other_port_or_scheme(url, gets_login):
    others = "http://[bad http://me:x@localhost:99999 http://me:x@[::1]:8080/simple"
    settings = {
        "index-url": "https://me:s3cret@index.test/simple/",
        "extra-index-url": others,
    }
    with index_session(settings) as session:
        request = session.prepare_request(requests.Request("GET", url))
    assert ("Authorization" in request.headers) is gets_login


@pytest.mark.parametrize(
    "url",
    [
        "http://me:s3cret@127.0.0.1:{dead}/simple/",
        "http://me:s3cret/?#@127.0.0.1:{dead}/simple/",
        "http://me:s3cret@[bad/simple/",
        "me:s3cret@127.0.0.1/simple",
    ],
)
def test_index_that_cannot_be_reached(index, url, monkeypatch):
    index.stop()
    monkeypatch.setenv("PIP_INDEX_URL", url.format(dead=index.server_port))
    with pytest.raises(StorageError) as caught:
        fetch("demo", "1.0", index.lock)
    assert "s3cret" not in str(caught.value)


def test_index_of_pip_configuration(index, tmp_path, monkeypatch):
    pytest.importorskip("pip")
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nindex-url = http://{index.address}/simple/\n")
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    assert fetch("demo", "1.0", index.lock).is_file()


def test_bad_lock(tmp_path):
    row = f'[[sdist]]\nversion = "1.0"\nfilename = "{NAME}"\nsha256 = "{"0" * 64}"\nsize = 1\n'
    path = tmp_path / "lock.toml"
    path.write_text(row.replace(NAME, "../evil"))
    with pytest.raises(
        SourceError, match=r"sdist\[1\].filename: is '../evil', not the name"
    ):
        read_lock(path)


def test_committed_lock():
    lock = read_lock(COMMITTED_LOCK)
    assert len(lock) == len({entry.sha256 for entry in lock.values()}) == 37
    assert all(
        entry.filename == f"vllm-{entry.version}.tar.gz" for entry in lock.values()
    )
    assert render_lock(lock.values()) == COMMITTED_LOCK.read_text()


def test_committed_wheel_lock():
    """A wheel for each CPU of every supported release; where there are builds, the last one."""
    place = COMMITTED_LOCK.with_name("wheels.toml")
    lock = read_wheel_lock(place)
    supported = {str(version) for version in load_recipe("vllm").supported}
    assert {cpu: entries.keys() for cpu, entries in lock.items()} == {
        "aarch64": supported,
        "x86_64": supported,
    }
    entries = [entry for cpu in lock.values() for entry in cpu.values()]
    assert len({entry.sha256 for entry in entries}) == 64
    assert lock["x86_64"]["0.23.0"].filename == (
        "vllm-0.23.0-2-cp38-abi3-manylinux_2_28_x86_64.whl"
    )
    tables = sorted(place.read_text().rstrip().split("\n\n"))
    assert sorted(render_lock(entries, "wheel").rstrip().split("\n\n")) == tables
