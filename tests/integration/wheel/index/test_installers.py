"""An index over a wheelhouse, served by what is at hand, and taken by a real pip and a real uv."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from patchkit.digests import sha256_of
from patchkit.wheel.index.write import write_index
from patchkit.wheel.wheelhouse.contents import add
from support.indexed import ALL, JSON_TYPE, VLLM
from support.needed import need
from support.wheels import write_wheel

DOCUMENT = Path(__file__).parents[4] / "docs/wheelhouse.md"


# Taken by pip and uv


def test_pip_takes_everything_by_the_public_version(world, cli, served, node):
    said = cli("wheelhouse", "index", "site").stdout
    assert "site/simple: wheels: 4, 0 MB; files: 19 new, 0 gone" in said
    assert "http://127.0.0.1:8000/simple/ leaf-thing==1.0 nvidia-nccl-cu13==2.28.9" in said
    server = served("site")
    node.pip("install", "--index-url", server.url, "vllm==0.25.1")
    assert node.has() == ALL
    assert "No broken requirements found" in node.pip("check")
    asked = server.asked()
    wheels = [name for name in asked if name.endswith(".whl")]
    assert len(wheels) == len(ALL)
    for name in wheels:  # what it requires is known before it is downloaded (PEP 658)
        assert asked.index(f"{name}.metadata") < asked.index(name)


def test_pip_and_uv_take_the_lock(world, index, served, node, house):
    index()
    server = served("site")
    lock = ["--require-hashes", "-r", house / "requirements.txt"]
    node.pip("install", "--index-url", server.url, *lock)
    assert node.has() == ALL
    node.clear()
    node.uv("install", "--default-index", server.url, *lock)
    assert node.has() == ALL


def test_other_wheels_than_those_that_were_locked(world, index, served, node, house, site):
    """The page has a sha256 as well; the lock does not depend on what the server says."""
    index()
    server = served("site")
    wheel = next(site.rglob("vllm*.whl"))
    true = sha256_of(wheel)
    wheel.unlink()
    requires = ["torch==2.11.0", "leaf_thing>=1"]
    write_wheel(wheel.parent, VLLM, project="vllm", requires=requires, files={"a": b"other"})
    wanted = ["--default-index", server.url, "vllm"]
    assert "Hash mismatch" in node.uv("install", *wanted, rc=1)

    page = wheel.with_name("index.html")
    page.write_text(page.read_text().replace(true, sha256_of(wheel)))
    lock = ["--require-hashes", "-r", house / "requirements.txt"]
    refused = node.pip("install", "--index-url", server.url, *lock, rc=1)
    assert "DO NOT MATCH THE HASHES" in refused
    assert "Hash mismatch" in node.uv("install", "--default-index", server.url, *lock, rc=1)
    assert node.has() == {}


def test_uv_locks_without_downloading_a_wheel(world, index, served, node, tmp_path):
    index()
    server = served("site")
    (tmp_path / "wanted.in").write_text("vllm==0.25.1\n")
    options = ["--default-index", server.url, "--generate-hashes", "--no-header", "wanted.in"]
    locked = node.uv("compile", *options)
    wheel = next((tmp_path / "wheelhouse").glob("vllm*"))
    assert f"vllm=={VLLM} \\\n    --hash=sha256:{sha256_of(wheel)}" in locked
    assert sum(name.endswith(".whl.metadata") for name in server.asked()) == len(ALL)
    assert not [name for name in server.asked() if name.endswith(".whl")]


def test_what_is_rejected_is_not_downloaded(held, index, served, node):
    """Two wheelhouses, one index: a release is chosen by metadata alone."""
    held("1.0", project="a", dir="old", tag="py3-none-any")
    held("1.0", project="b", dir="old", tag="py3-none-any")
    held("2.0", project="a", dir="new", tag="py3-none-any", requires=["b>=2"])
    held("2.0", project="b", dir="new", tag="py3-none-any")
    index("old", "new")
    server = served("site")
    node.pip("install", "--index-url", server.url, "a", "b<2")
    assert node.has() == {"a": "1.0", "b": "1.0"}
    assert "a-2.0-py3-none-any.whl.metadata" in server.asked()
    assert "a-2.0-py3-none-any.whl" not in server.asked()


def test_a_second_index_beside_it(held, index, served, node, tmp_path):
    """Why --extra-index-url is not what the document says: any index may offer a later one."""
    held(VLLM, project="vllm", tag="py3-none-any")
    index()
    other = tmp_path / "other"
    add(tmp_path / "others", write_wheel(other, "99", project="vllm", tag="py3-none-any"), {})
    write_index(tmp_path / "elsewhere", [tmp_path / "others"])
    ours, theirs = served("site").url, served("elsewhere").url

    node.pip("install", "--index-url", ours, "--extra-index-url", theirs, "vllm")
    assert node.has() == {"vllm": "99"}
    node.clear()
    node.uv("install", "--index", ours, "--default-index", theirs, "vllm")
    assert node.has() == {"vllm": VLLM}

    project = tmp_path / "project"
    project.mkdir()
    block = re.search(r"```toml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[1]
    assert 'url = "http://127.0.0.1:8000/simple/"' in block
    text = block.replace("http://127.0.0.1:8000/simple/", ours).replace("nvidia-nccl-cu13 =", "# ")
    head = '[project]\nname = "p"\nversion = "1"\ndependencies = ["vllm"]\n'
    (project / "pyproject.toml").write_text(f"{head}{text}")
    options = ["--default-index", theirs, "--no-header", project / "pyproject.toml"]
    assert f"vllm=={VLLM}\n" in node.uv("compile", *options)


# Served by nginx, as the document says


@pytest.fixture
def nginx(tmp_path):
    """Serve ``site`` by nginx with the configuration of the document; yields its URL."""
    need("nginx")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    block = re.search(r"```nginx\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[1]
    assert "127.0.0.1:8000;" in block
    assert "/srv/site;" in block
    block = block.replace("127.0.0.1:8000", address).replace("/srv/site", str(tmp_path / "site"))
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = "".join(f"{kind}_temp_path {tmp_path}/{kind};\n" for kind in kinds)
    user = "user root;\n" if os.geteuid() == 0 else ""  # else its worker cannot read the folder
    (tmp_path / "nginx.conf").write_text(
        f"{user}daemon off;\npid {tmp_path}/pid;\nerror_log {tmp_path}/error.log;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{folders}types {{ text/html html; }}\n{block}}}\n"
    )
    command = ["nginx", "-c", tmp_path / "nginx.conf", "-p", tmp_path]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while not (tmp_path / "pid").exists():
            assert process.poll() is None, (tmp_path / "error.log").read_text()
            time.sleep(0.01)
        yield f"http://{address}/simple/"
        process.terminate()


def test_nginx_gives_json_to_who_asks_for_it(world, index, nginx, node, site):
    index()

    def asked(path, accept):
        request = urllib.request.Request(nginx + path, headers={"Accept": accept})
        with urllib.request.urlopen(request) as answer:
            assert answer.headers["Vary"] == "Accept"
            return answer.headers["Content-Type"], answer.read()

    pips = f"{JSON_TYPE}, application/vnd.pypi.simple.v1+html; q=0.1, text/html; q=0.01"
    for path in ("", "vllm/"):
        folder = site / "simple" / path
        assert asked(path, pips) == (JSON_TYPE, (folder / "index.json").read_bytes())
        for browser in ("text/html,application/xhtml+xml,*/*;q=0.8", "*/*"):
            assert asked(path, browser) == ("text/html", (folder / "index.html").read_bytes())
    node.pip("install", "--index-url", nginx, "vllm==0.25.1")
    assert node.has() == ALL
    node.clear()
    node.uv("install", "--default-index", nginx, "vllm==0.25.1")
    assert node.has() == ALL
