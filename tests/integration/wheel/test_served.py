"""Serve a wheelhouse as files, and let a real pip take it by the lock."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from patchkit.wheel.wheelhouse.contents import add_wheel
from support.wheels import write_wheel


@pytest.fixture
def house(tmp_path):
    for version, project in (("0.25.1+cu130.gb10.abc123", "vllm"), ("1.0", "leaf")):
        wheel = write_wheel(tmp_path / "made", version, project=project, tag="py3-none-any")
        add_wheel(tmp_path / "wheelhouse", wheel, {"target": "gb10"})
    return tmp_path / "wheelhouse"


@pytest.fixture
def url(house):
    handler = partial(SimpleHTTPRequestHandler, directory=str(house))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_pip_takes_what_is_locked_and_nothing_else(house, url, tmp_path):
    def install(*words):
        where = ("--no-index", "--find-links", url, "--no-deps", "--target", tmp_path / "node")
        command = [sys.executable, "-m", "pip", "install", *where, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    lock = ("--require-hashes", "-r", house / "requirements.txt")
    done = install(*lock)
    assert done.returncode == 0, done.stderr
    installed = {each.name for each in (tmp_path / "node").glob("*.dist-info")}
    assert installed == {"vllm-0.25.1+cu130.gb10.abc123.dist-info", "leaf-1.0.dist-info"}

    (leaf,) = house.glob("leaf-*.whl")
    leaf.unlink()
    write_wheel(house, "1.0", project="leaf", tag="py3-none-any", files={"a": b"other"})
    refused = install("--upgrade", *lock)
    assert refused.returncode == 1
    assert "DO NOT MATCH THE HASHES" in refused.stderr
