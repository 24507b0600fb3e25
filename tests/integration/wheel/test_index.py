"""Indexes over wheelhouses, served by what is at hand, and taken by a real pip and a real uv."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote
from zipfile import ZipFile

import pytest
from uv import find_uv_bin

from patchkit.digests import sha256_of
from patchkit.errors import HashMismatchError, PatchkitError, SourceError, UsageError
from patchkit.versions import ExactPin
from patchkit.wheel.index.write import write_index
from patchkit.wheel.wheelhouse.contents import add
from patchkit.wheel.wheelhouse.overriding import chosen, record
from patchkit.wheel.wheelhouse.prune import prune
from support.faults import killed_everywhere
from support.needed import need
from support.wheels import write_wheel

DOCUMENT = Path(__file__).parents[3] / "docs/wheelhouse.md"
VLLM, NCCL = "0.25.1+cu130.gb10.ab12cd34ef", "2.28.9+gb10.abc123"
FACTS = {"target": "gb10"}
JSON_TYPE = "application/vnd.pypi.simple.v1+json"
ALL = {"Leaf.Thing": "1.0", "nvidia-nccl-cu13": NCCL, "torch": "2.11.0", "vllm": VLLM}


@pytest.fixture
def house(tmp_path):
    return tmp_path / "wheelhouse"


@pytest.fixture
def held(tmp_path):
    """Put a wheel into a wheelhouse: ``held("1.0", project="leaf")``."""

    def put(version, *, dir="wheelhouse", **more):
        return add(tmp_path / dir, write_wheel(tmp_path / "made", version, **more), FACTS)

    return put


@pytest.fixture
def world(held):
    """A vLLM and an NCCL that were built here, and what they need."""
    held(VLLM, project="vllm", requires=["torch==2.11.0", "leaf_thing>=1"])
    held(NCCL)
    held("2.11.0", project="torch", requires=["nvidia-nccl-cu13==2.28.9"])
    held("1.0", project="Leaf.Thing", tag="py3-none-any", python=">=3.8, <4")


@pytest.fixture
def site(tmp_path):
    return tmp_path / "site"


@pytest.fixture
def index(house, site):
    """Write the index of ``wheelhouse``, or of others: ``index("old", "new")``."""
    return lambda *names: write_index(site, [house.with_name(name) for name in names] or [house])


@pytest.fixture
def served(tmp_path):
    """Serve a folder by Python's own server: ``served("site")`` has ``url`` and ``asked()``."""
    with contextlib.ExitStack() as running:

        def start(folder):
            log = tmp_path / f"{folder}.log"
            command = [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1"]
            command += ["--directory", folder, "0"]
            errors = running.enter_context(log.open("w"))
            process = running.enter_context(
                subprocess.Popen(
                    command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=errors, text=True
                )
            )
            running.callback(process.terminate)
            port = re.search(r"port (\d+)", process.stdout.readline())[1]

            def asked():
                paths = re.findall(r'"GET (\S+) HTTP/1.1" 200', log.read_text())
                return [unquote(path).rpartition("/")[2] or path for path in paths]

            return SimpleNamespace(url=f"http://127.0.0.1:{port}/simple/", asked=asked)

        yield start


@pytest.fixture
def node(tmp_path):
    """An empty environment: ``node.pip("install", ...)``, ``node.uv(...)``, ``node.has()``."""
    place = tmp_path / "node"
    venv.create(place, with_pip=False)
    program = str(place / "bin/python")
    alone = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    settings = {
        **alone,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_CACHE_DIR": "1",
        "PIP_NO_COMPILE": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "UV_NO_CONFIG": "1",
        "UV_CACHE_DIR": str(tmp_path / "uv"),
        "UV_PYTHON": program,
    }

    def run(command, rc):
        done = subprocess.run(command, env=settings, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == rc, done.stdout + done.stderr
        return done.stdout + done.stderr

    def pip(*arguments, rc=0):
        return run([sys.executable, "-m", "pip", "--python", program, *map(str, arguments)], rc)

    def uv(*arguments, rc=0):
        return run([find_uv_bin(), "pip", *map(str, arguments)], rc)

    def has():
        found = {}
        for home in place.glob("lib/python*/site-packages/*.dist-info"):
            name, version = re.findall(
                r"^(?:Name|Version): (.+)", (home / "METADATA").read_text(), re.MULTILINE
            )
            found[name] = version
        return found

    def clear():
        for home in place.glob("lib/python*/site-packages"):
            shutil.rmtree(home)
            home.mkdir()

    return SimpleNamespace(pip=pip, uv=uv, has=has, clear=clear)


def files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class Links(HTMLParser):
    """The links of a page, with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "a":
            self.found.append(dict(attrs))


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


# What is written


def test_pages_say_what_the_wheels_are(world, index, house, site):
    index()
    for wheel in house.glob("*.whl"):
        with ZipFile(wheel) as archive:
            metadata = archive.read(next(n for n in archive.namelist() if n.endswith("/METADATA")))
        (place,) = site.rglob(wheel.name)
        assert place.samefile(wheel)
        assert place.with_name(f"{wheel.name}.metadata").read_bytes() == metadata
        python = ">=3.8, <4" if wheel.name.startswith("Leaf") else None
        digest = hashlib.sha256(metadata).hexdigest()

        (link,) = Links((place.parent / "index.html").read_text()).found
        address, _, fragment = link["href"].partition("#")
        assert (unquote(address), fragment) == (wheel.name, f"sha256={sha256_of(wheel)}")
        assert "+" not in address
        assert link.get("data-requires-python") == python
        kinds = ("data-core-metadata", "data-dist-info-metadata")
        assert {link[kind] for kind in kinds} == {f"sha256={digest}"}

        page = json.loads((place.parent / "index.json").read_text())
        assert page["meta"] == {"api-version": "1.1"}
        assert page["name"] == place.parent.name
        (file,) = page["files"]
        assert file.pop("requires-python", None) == python
        assert file == {
            "filename": wheel.name,
            "url": address,
            "hashes": {"sha256": sha256_of(wheel)},
            "size": wheel.stat().st_size,
            "core-metadata": {"sha256": digest},
            "dist-info-metadata": {"sha256": digest},
        }
    projects = ["leaf-thing", "nvidia-nccl-cu13", "torch", "vllm"]
    root = Links((site / "simple/index.html").read_text())
    assert [link["href"] for link in root.found] == [f"{project}/" for project in projects]
    listed = json.loads((site / "simple/index.json").read_text())["projects"]
    assert listed == [{"name": project} for project in projects]
    check = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    subprocess.run(check, cwd=site, check=True)
    written = {line.split("  ")[1] for line in (site / "SHA256SUMS").read_text().splitlines()}
    assert written == files(site).keys() - {"SHA256SUMS"}


def test_the_same_wheels_give_the_same_bytes(held, index, site):
    for name, order in (("one", ("1.0", "2.0")), ("other", ("2.0", "1.0"))):
        for version in order:
            held(version, project=f"p{version[0]}", dir=name, tag="py3-none-any")
    index("one")
    first = files(site)
    assert index("other").new == ()
    shutil.rmtree(site)
    index("other")
    assert files(site) == first


def test_what_a_former_index_had_goes_and_nothing_else(world, index, cli, house, site):
    index()
    (site / "simple/torch/notes.txt").write_text("mine")
    (site / "robots.txt").write_text("mine")
    before = files(site)
    prune(house, drop=["torch", "vllm"])

    planned = json.loads(cli("wheelhouse", "index", "site", "--dry-run", "--json").stdout)
    assert files(site) == before
    done = cli("wheelhouse", "index", "site", "-v").stdout
    for path in planned["gone"]:
        assert f"- {path}\n" in done

    now = files(site)
    gone = before.keys() - now.keys()
    assert gone == {*planned["gone"]}
    assert len(gone) == 2 * 4
    assert {path for path, data in now.items() if before[path] != data} == {*planned["new"]}
    assert {*planned["new"]} == {"SHA256SUMS", "simple/index.html", "simple/index.json"}
    assert now["simple/torch/notes.txt"] == now["robots.txt"] == b"mine"
    assert not (site / "simple/vllm").exists()


@pytest.mark.parametrize("path", ["SHA256SUMS", "simple/index.html", "simple/vllm/index.json"])
def test_files_of_others_are_not_replaced(path, world, index, site):
    place = site / path
    place.parent.mkdir(parents=True)
    place.write_text(f"{'0' * 64}  ../vllm.whl\n")
    with pytest.raises(UsageError, match=f"site/{path}: is there, and no index of patchkit's"):
        index()
    assert list(files(site)) == [path]


def test_links_are_not_followed(world, index, house, site, tmp_path):
    wheel = next(house.glob("torch*"))
    aside = shutil.move(wheel, tmp_path / wheel.name)
    wheel.symlink_to(aside)
    with pytest.raises(HashMismatchError, match=r"torch.*: is a link"):
        index()
    assert not site.exists()

    wheel.unlink()
    shutil.move(aside, wheel)
    outside = tmp_path / "outside"
    outside.mkdir()
    site.mkdir()
    (site / "simple").symlink_to(outside)
    with pytest.raises(SourceError, match="simple is a symbolic link"):
        index()
    assert files(outside) == {}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda wheel: wheel.write_bytes(b"no zip"), "is not the wheel that is listed"),
        (lambda wheel: wheel.unlink(), "is listed, and not there"),
    ],
)
def test_wheels_that_are_not_as_listed(change, says, world, index, house, site):
    change(next(house.glob("vllm*")))
    with pytest.raises(PatchkitError, match=says):
        index()
    assert not site.exists()


def test_refusals(held, index, house, cli):
    house.mkdir()
    with pytest.raises(UsageError, match="wheelhouse: no wheels to offer"):
        index()
    with pytest.raises(UsageError, match="gone: no such folder"):
        index("gone")
    held(VLLM, project="vllm")
    assert "is the wheelhouse itself" in cli("wheelhouse", "index", "wheelhouse", rc=2).stderr
    held("0.25.1+cu130.gb10.ffffffffff", project="vllm", dir="other")
    with pytest.raises(UsageError, match="are two builds of one version") as refused:
        index("wheelhouse", "other")
    assert refused.value.why == "vllm==0.25.1 takes the one whose label sorts last"


def test_what_a_wheel_says_is_text_and_nothing_else(held, index, site):
    """A field that is no specifier is left out; one that is stays in its attribute."""
    held("1.0", project="a", tag="py3-none-any", python='>=3"><b>', requires=["="])
    held("1.0", project="b", tag="py3-none-any", python=">=3,<4")
    assert index().offers.lacking == ()
    assert b"><b>" not in files(site)["simple/a/index.html"]
    assert "requires-python" not in (site / "simple/a/index.json").read_text()
    (link,) = Links((site / "simple/b/index.html").read_text()).found
    assert link["data-requires-python"] == ">=3,<4"


def test_what_the_index_lacks_is_said(held, index, cli, tmp_path):
    """Of an index alone pip could not install it; of one with what fill brings, it can."""
    held("1.0", project="a", tag="py3-none-any", requires=["B_b>1", "c; python_version < '3'"])
    said = cli("wheelhouse", "index", "site").stdout
    assert "site/simple: wheels: 1," in said
    assert "note not in it, and required by what is: b-b (1)" in said
    assert said.splitlines()[-1].endswith("wheelhouse fill --dir wheelhouse")
    write_wheel(tmp_path / "offered", "2.0", project="b-b", tag="py3-none-any")
    fill = ["wheelhouse", "fill", "--offline", "--find-links", "offered", "--cpu", "aarch64"]
    cli(*fill, "--lock-only")
    assert index().offers.lacking == ("b-b",)
    cli(*fill)
    assert index().offers.lacking == ()


def test_with_an_override_pip_is_given_the_lock(held, house, cli):
    held("2.11.0", project="torch", requires=["nvidia-nccl-cu13==2.28.9"])
    record(house, chosen(house, ExactPin("nvidia-nccl-cu13==2.30.7")))
    held("2.30.7+gb10.abc123")
    said = cli("wheelhouse", "index", "site").stdout
    assert "/simple/ --no-deps --require-hashes -r requirements.txt" in said


# Interrupted, and without room


def test_killed_anywhere(held, site, tmp_path):
    """What a page names is there at any moment, and the next run finishes what was begun."""
    for name, version in (("old", "1.0"), ("new", "2.0")):
        held(version, project="a", dir=name, tag="py3-none-any")
        held("1.0", project=f"only-{name}", dir=name, tag="py3-none-any")
    wanted = tmp_path / "wanted"
    write_index(wanted, [tmp_path / "new"])

    def prepare():
        shutil.rmtree(site, ignore_errors=True)
        write_index(site, [tmp_path / "old"])

    count = 0
    for _ in killed_everywhere(lambda: write_index(site, [tmp_path / "new"]), prepare, step=9):
        for page in site.glob("simple/*/index.json"):
            for file in json.loads(page.read_text())["files"]:
                assert sha256_of(page.with_name(file["filename"])) == file["hashes"]["sha256"]
        write_index(site, [tmp_path / "new"])
        assert files(site) == files(wanted)
        assert not (site / "simple/only-old").exists()
        count += 1
    assert count > 5


def test_on_another_disk_and_on_a_full_one(small_disk, world, cli, house, tmp_path):
    large, small = (small_disk(f"size={size}") / "site" for size in ("2m", "64k"))
    cli("wheelhouse", "index", large)
    wheel = next(house.glob("vllm*"))
    (copy,) = large.rglob(wheel.name)
    assert copy.read_bytes() == wheel.read_bytes()
    assert not copy.samefile(wheel)
    assert "No space left on device" in cli("wheelhouse", "index", small, rc=7).stderr
    assert files(small) == {}
