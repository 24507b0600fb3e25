"""Wheelhouses filled by a real uv: from folders, from small indexes, and once from the index."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import venv
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest

from patchkit.digests import sha256_of
from patchkit.errors import HashMismatchError
from patchkit.wheel.file.name import wheel_name
from patchkit.wheel.filling.download import download
from patchkit.wheel.filling.fill import numbered_like_cuda
from patchkit.wheel.filling.node_platform import node_platform
from patchkit.wheel.filling.resolve import LockedWheel, resolve
from patchkit.wheel.filling.uv import WheelSources
from patchkit.wheel.wheelhouse.contents import add, entries
from support.wheels import CPU, ELSEWHERE, HERE, OTHER_CPU, write_wheel

OURS = "2.28.9+gb10.abc123"
FACTS = {"target": "gb10"}
TORCH = {"torch/lib/libtorch_cuda.so": b"", "torch/__init__.py": b""}
THIS = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture
def house(tmp_path):
    return tmp_path / "wheelhouse"


@pytest.fixture
def built(tmp_path, house):
    """Put a wheel into the wheelhouse as a build does: ``built("0.25.1", project="vllm")``."""
    return lambda version, **more: add(
        house, write_wheel(tmp_path / "made", version, **more), FACTS
    )


@pytest.fixture
def offered(tmp_path):
    """What there is to be had: ``offered("six", "1.0")``."""

    def make(project, version, tag="py3-none-any", **more):
        return write_wheel(tmp_path / "offered", version, project=project, tag=tag, **more)

    return make


@pytest.fixture
def world(offered, built):
    """A vLLM and an NCCL that were built here, and a torch that pins stock's NCCL."""

    def make(tag=HERE, cpu=CPU):
        built("0.25.1", project="vllm", tag=tag, requires=["torch==2.11.0", "typing-thing>=1"])
        built(OURS, tag=tag)
        requires = [
            "nvidia-nccl-cu13==2.28.9; sys_platform == 'linux'",
            f"only-there; platform_machine == '{cpu}'",
            f"only-elsewhere; platform_machine != '{cpu}'",
            "for-old; python_version < '3.12'",
            "for-new; python_version >= '3.12'",
        ]
        offered("torch", "2.11.0", tag, requires=requires, files=TORCH)
        offered("nvidia-nccl-cu13", "2.28.9", tag)
        offered("typing-thing", "1.0")
        offered("typing-thing", "2.0", requires=["leaf"])
        for project in ("leaf", "only-there", "for-new", "for-old"):
            offered(project, "1.0")

    return make


@pytest.fixture
def fill(cli, tmp_path):
    """`patchkit wheelhouse fill`, from the folder alone, whatever pip is configured for."""
    alone = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}

    def run(*arguments, **how):
        (tmp_path / "offered").mkdir(exist_ok=True)
        options = ["--offline", "--find-links", tmp_path / "offered", *arguments]
        return cli("wheelhouse", "fill", *options, env=alone, **how)

    return run


def contents(house):
    return {path.name: path.read_bytes() for path in house.iterdir() if path.is_file()}


def locked(house):
    lines = (house / "requirements.txt").read_text().splitlines()
    return [line.partition(" ")[0] for line in lines if not line.startswith("#")]


ALL = ["for-new==1.0", "leaf==1.0", f"nvidia-nccl-cu13=={OURS}", "only-there==1.0"]
ALL += ["torch==2.11.0", "typing-thing==2.0", "vllm==0.25.1"]


def test_a_lock_for_another_machine_and_another_python(world, fill, house, cli):
    world(ELSEWHERE, OTHER_CPU)
    done = fill()  # the Python of DGX OS, whichever runs this
    said, told = done.stdout, done.stderr.splitlines()

    assert locked(house) == ALL
    # Before each thing that may take long, in a pipe as well.
    assert [line.partition(" ")[0] for line in told] == ["resolving", "dependencies:", "to"]
    assert told[1:] == ["dependencies: 5; resolving what torch==2.11.0 requires", "to download: 5"]
    assert f"5 dependencies there and locked, 0 MB, for CPython 3.12 on {OTHER_CPU} with" in said
    assert "torch 2.11.0: CUDA 13, as it has torch/lib/libtorch_cuda.so" in said
    assert {path.name for path in house.iterdir()} == {*contents(house)}
    assert len(contents(house)) == 3 + len(ALL)
    kinds = {entry.name.project: entry.kind for entry in entries(house)}
    assert [kinds[name] for name in ("vllm", "nvidia-nccl-cu13", "torch", "leaf")] == [
        *("built", "built", "dependency", "dependency")
    ]
    assert "2 wheels and 5 dependencies, all as listed" in cli("verify", house).stdout
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=house, check=True)

    before = contents(house)
    assert json.loads(fill("--json").stdout)["new"] == []
    assert contents(house) == before

    fill("--python-version", "3.11")
    assert [each for each in locked(house) if each.startswith("for-")] == ["for-old==1.0"]
    assert not list(house.glob("for_new*"))


def test_only_a_lock(world, fill, house, cli):
    world()
    fill("--lock-only")
    assert locked(house) == ALL
    assert len(contents(house)) == 3 + 2
    header = (house / "requirements.txt").read_text().splitlines()[:2]
    assert header[0].endswith(f"for CPython 3.12 on {CPU} with glibc 2.39:")
    assert "--no-index" not in header[1]
    assert "all as listed" in cli("verify").stdout
    listed = json.loads(cli("wheelhouse", "list", "--json").stdout)["wheels"]
    assert {wheel["kind"] for wheel in listed} == {"built", "locked"}

    assert "--no-index" in fill().stdout
    assert len(contents(house)) == 3 + len(ALL)
    dropped = cli("wheelhouse", "prune", "--dependencies").stdout
    assert "torch-2.11.0" in dropped
    assert locked(house) == [f"nvidia-nccl-cu13=={OURS}", "vllm==0.25.1"]
    assert len(contents(house)) == 3 + 2


@pytest.fixture
def node(tmp_path):
    """pip for an empty virtual environment that knows no index: ``node("install", ...)``."""
    venv.create(tmp_path / "node", with_pip=False)
    program = tmp_path / "node/bin/python"
    alone = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    settings = {**alone, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}

    def pip(*arguments, rc=0):
        command = [sys.executable, "-m", "pip", "--python", program, *arguments]
        done = subprocess.run(
            [*map(str, command)], env=settings, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == rc, done.stdout + done.stderr
        return done.stdout + (done.stderr if rc else "")

    return pip


LOCK = ["--find-links", "wheelhouse", "--require-hashes", "-r", "wheelhouse/requirements.txt"]


def installed(node):
    return sorted(
        f"{e['name']}=={e['version']}".lower() for e in json.loads(node("list", "--format=json"))
    )


def test_every_node_installs_the_same(world, fill, house, node):
    world()
    fill("--python-version", THIS)
    node("install", "--no-index", *LOCK)
    assert installed(node) == locked(house)
    assert "No broken requirements found" in node("check")


def test_what_the_nodes_have_is_kept_and_not_downloaded(world, fill, house, node, cli, tmp_path):
    """What one of two nodes lacks is downloaded; a version that does not do is, too."""
    world()
    has = "# of a node\ntorch==2.11.0+cu130\nTyping_Thing==1.0\nonly-there==0.1\nfor-new==1.0\n"
    (tmp_path / "one.txt").write_text(f"{has}leaf==1.0\n")
    (tmp_path / "other.txt").write_text(has)
    listings = ["--node-has", "one.txt", "--node-has", "other.txt"]
    said = fill("--python-version", THIS, "--with", "leaf", *listings)

    assert "to download: " in said.stderr
    assert "not downloaded, as the nodes have them: " in said.stdout
    kinds = {entry.name.pinned: str(entry.kind) for entry in entries(house)}
    old_or_new = "for-new==1.0" if "for-new==1.0" in kinds else "for-old==1.0"
    assert kinds == {
        "leaf==1.0": "dependency",
        "only-there==1.0": "dependency",
        "torch==2.11.0": "installed",
        "typing-thing==1.0": "installed",
        old_or_new: "installed" if "new" in old_or_new else "dependency",
        f"nvidia-nccl-cu13=={OURS}": "built",
        "vllm==0.25.1": "built",
    }
    assert not list(house.glob("torch*"))
    lines = (house / "requirements.txt").read_text().splitlines()
    assert lines[2].startswith("# Not in DIR, as the nodes have them: ")
    assert "torch==2.11.0, typing-thing==1.0." in lines[2]
    assert "all as listed" in cli("verify").stdout

    refused = node("install", "--no-index", *LOCK, rc=1)
    assert "No matching distribution found for " in refused
    here = tmp_path / "here"
    requires = ["nvidia-nccl-cu13==2.28.9"]
    wheels = [write_wheel(here, "1.0", project=name) for name in ("typing-thing", "for-new")]
    wheels.append(write_wheel(here, "2.11.0+cu130", project="torch", requires=requires))
    node("install", "--no-index", "--no-deps", *wheels)
    node("install", "--no-index", *LOCK)
    assert {"torch==2.11.0+cu130", "vllm==0.25.1", "typing-thing==1.0"} <= {*installed(node)}
    assert "No broken requirements found" in node("check")


def test_a_listing_that_names_no_versions(world, fill, tmp_path):
    world()
    (tmp_path / "node.txt").write_text("a==1\ntorch @ file:///torch.whl\n")
    said = fill("--node-has", "node.txt", rc=2).stderr
    assert "node.txt:2: is 'torch @ file:///torch.whl', not PROJECT==VERSION" in said
    assert "next: on a node: pip list --format=freeze > FILE" in said


def test_what_the_user_wants_as_well(world, offered, fill, house):
    world()
    offered("ray", "2.0")
    offered("ray", "3.0")
    fill("--with", "ray<3")
    assert "ray==2.0" in locked(house)


def test_what_is_numbered_like_cuda_is_of_the_one_cuda(offered, tmp_path):
    """Else a new cuda-bindings leads to a cuda-python that is too old to say what it needs."""
    for version in ("13.4.4", "13.5.0"):
        offered("cuda-bindings", version)
    offered("cuda-python", "13.4.4", requires=["cuda-bindings==13.4.4"])
    offered("cuda-python", "12.6.2")
    wheel = offered("vllm", "0.33.0", requires=["cuda-bindings>=13", "cuda-python"])
    node = node_platform(CPU, "3.12", "2.39")
    sources = WheelSources(offline=True, folders=(tmp_path / "offered",))

    def chosen(*majors):
        locked = resolve([wheel], [], node, sources, numbered_like_cuda(majors))
        return [each.name.pinned for each in locked]

    assert chosen() == ["cuda-bindings==13.5.0", "cuda-python==12.6.2"]
    assert chosen(13) == ["cuda-bindings==13.4.4", "cuda-python==13.4.4"]


@pytest.mark.parametrize("seen", ["requirements", "file"])
def test_a_torch_for_cpus_alone(seen, built, offered, fill, house):
    built("0.19.1", project="vllm", requires=["torch==2.10.0"])
    requires = ["nvidia-x; platform_machine == 'vax'"] if seen == "requirements" else ["nvidia-x"]
    offered("torch", "2.10.0", HERE, requires=requires, files={"torch/lib/libtorch.so": b""})
    offered("nvidia-x", "1.0")
    before = contents(house)

    said = fill(rc=5).stderr

    assert f"torch 2.10.0 for {CPU} is one for CPUs alone" in said
    assert (
        "none of NVIDIA's" if seen == "requirements" else "no torch/lib/libtorch_cuda.so"
    ) in said
    assert contents(house) == before


@pytest.mark.parametrize(
    ("requires", "says"),
    [
        ("gone>=1", "gone was not found"),
        ("only-source", "only-source==1.0 has no usable wheels"),
        ("other-cpu", "no wheels with a matching platform tag"),
        ("a, b<2", "all versions of a depend on b>=2"),
    ],
)
def test_what_cannot_be_had(requires, says, built, offered, fill, house, tmp_path):
    built("0.25.1", project="vllm", requires=requires.split(", "))
    offered("other-cpu", "1.0", ELSEWHERE)
    offered("a", "1.0", requires=["b>=2"])
    offered("b", "1.0")
    offered("b", "2.0")
    (tmp_path / "offered/only_source-1.0.tar.gz").write_bytes(b"")
    before = contents(house)

    said = fill(rc=3).stderr

    assert f"there is no set of wheels for CPython 3.12 on {CPU} with glibc 2.39 that fits" in said
    assert says in said
    assert contents(house) == before
    assert not (house / ".filling").exists()


def test_the_conflict_is_told_in_full(built, offered, fill):
    built("0.25.1", project="vllm", requires=["torch==2.11.0"])
    built("2.29.7+gb10.a1b2c3")
    offered("torch", "2.11.0", HERE, requires=["nvidia-nccl-cu13==2.28.9"], files=TORCH)
    offered("nvidia-nccl-cu13", "2.28.9", HERE)
    said = fill(rc=3).stderr
    assert "all versions of torch depend on nvidia-nccl-cu13==2.28.9" in said
    assert "2.29.7+gb10.a1b2c3" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--python-version", "2.7"], "--python-version takes a version such as 3.12, not '2.7'"),
        (["--glibc", "3.0"], "--glibc takes a version such as 2.39, not '3.0'"),
        (["--dir", "empty"], "empty holds no wheel that patchkit built"),
    ],
)
def test_refusals(arguments, says, world, fill, tmp_path):
    world()
    (tmp_path / "empty").mkdir()
    assert says in fill(*arguments, rc=2).stderr


def test_two_cpus_need_two_wheelhouses(built, fill):
    built(OURS)
    built(OURS, tag=ELSEWHERE)
    assert "wheels for aarch64 and x86_64" in fill(rc=2).stderr


def test_other_bytes_than_those_that_were_locked(offered, tmp_path):
    wheel = offered("six", "1.0")
    locked = LockedWheel(name=wheel_name(wheel.name), sha256="0" * 64, url=wheel.as_uri(), size=0)
    (tmp_path / "new").mkdir()
    with pytest.raises(HashMismatchError, match=r"six-1\.0-py3-none-any\.whl is not the file"):
        download([locked], tmp_path / "new", lambda _done, _all: None)
    assert not list((tmp_path / "new").iterdir())


def test_the_file_that_an_installer_takes(built, offered, fill, house, node):
    """pip, asked on this machine, takes the same of several files that fit."""
    short = THIS.replace(".", "")
    built("0.25.1", project="vllm", requires=["choice"])
    for tag in (
        *("py3-none-any", f"cp38-abi3-manylinux_2_17_{CPU}", f"cp{short}-cp{short}-linux_{CPU}"),
        *(f"cp{short}-cp{short}-manylinux_2_{minor}_{CPU}" for minor in (17, 28, 40)),
        *(f"cp{short}-cp{short}-manylinux2014_{OTHER_CPU}", "cp39-cp39-manylinux2014_x86_64"),
    ):
        offered("choice", "1.0", tag)
    fill("--python-version", THIS, "--glibc", "2.36", "--lock-only")
    (chosen,) = (entry for entry in entries(house) if entry.name.project == "choice")
    assert chosen.name.tag == f"cp{short}-cp{short}-manylinux_2_28_{CPU}"


@pytest.fixture
def index(offered, tmp_path):
    """An index with a password, of what is offered then.

    ``asked`` lists every wheel that was asked for, with the byte it is to begin at; ``stopped`` has
    the one whose second half does not come.
    """
    files = tmp_path / "offered"
    seen = SimpleNamespace(stopped="", reached=threading.Event(), arguments=b"", asked=[])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.arguments += b"".join(map(_command_line, Path("/proc").glob("[0-9]*")))
            if self.headers["Authorization"] != f"Basic {b64encode(b'me:s3cret').decode()}":
                self.send_error(401)
                return
            body, begin = self._body(), 0
            if self.path.endswith(".whl"):
                begin = int(self.headers.get("Range", "bytes=0-").strip("bytes=-"))
                seen.asked.append((self.path.strip("/"), begin))
            self.send_response(206 if begin else 200)
            self.send_header("Content-Type", "application/vnd.pypi.simple.v1+json")
            self.send_header("Content-Length", str(len(body) - begin))
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(body) - 1}/{len(body)}")
            self.end_headers()
            if seen.stopped and self.path.endswith(seen.stopped):
                self.wfile.write(body[: len(body) // 2])
                seen.reached.set()
                time.sleep(60)
            self.wfile.write(body[begin:])

        def _body(self):
            path = self.path.strip("/").removesuffix(".metadata")
            if self.path.endswith(".metadata"):
                with ZipFile(files / path) as wheel:
                    return wheel.read(next(n for n in wheel.namelist() if n.endswith("/METADATA")))
            if not self.path.endswith("/"):
                return (files / path).read_bytes()
            project = path.rpartition("/")[2]
            offers = [
                {
                    "filename": file.name,
                    "url": f"/{file.name}",
                    "hashes": {"sha256": sha256_of(file)},
                    "size": file.stat().st_size,
                    "core-metadata": True,
                }
                for file in sorted(files.glob(f"{project.replace('-', '_')}-*"))
            ]
            page = {"meta": {"api-version": "1.1"}, "name": project, "files": offers}
            return json.dumps(page).encode()

        def log_message(self, *_arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    seen.url = f"http://me:s3cret@127.0.0.1:{server.server_port}/simple/"
    yield seen
    server.shutdown()
    server.server_close()


def _command_line(process):
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it ended
        return b""


def alone_with(index):
    return {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": "/nonexistent",
        "PIP_INDEX_URL": index.url,
    }


def test_an_index_with_a_password(world, index, house, cli):
    """It is given to uv and to the downloads, is in no list of processes, and in no message."""
    world()
    wrong = alone_with(SimpleNamespace(url=index.url.replace("s3cret", "wr0ng")))
    refused = cli("wheelhouse", "fill", env=wrong, rc=7).stderr
    assert "the package index denies access" in refused
    said = cli("wheelhouse", "fill", env=alone_with(index))
    assert locked(house) == ALL
    assert b"pip\0compile" in index.arguments
    assert b"s3cret" not in index.arguments
    assert "s3cret" not in said.stdout + said.stderr
    assert "wr0ng" not in refused


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ended_while_it_downloads(number, world, offered, index, house, cli, environment, tmp_path):
    """The next run goes on: no byte of a wheel that is there is asked for once more."""
    world()
    large = {**TORCH, "large.bin": os.urandom(1_200_000)}
    torch = offered("torch", "2.11.0", HERE, requires=["nvidia-nccl-cu13==2.28.9"], files=large)
    before = contents(house)
    index.stopped = torch.name
    process = subprocess.Popen(
        [sys.executable, "-m", "patchkit", "wheelhouse", "fill"],
        cwd=tmp_path,
        env={**environment, **alone_with(index)},
    )
    assert index.reached.wait(60)
    part = house / ".filling" / f".{torch.name}.partial"
    while len(list((house / ".filling").glob("*.whl"))) < 2 or part.stat().st_size < 500_000:
        time.sleep(0.01)
    kept = part.stat().st_size
    process.send_signal(number)
    assert process.wait(30) == (143 if number == signal.SIGTERM else -number)

    assert contents(house) == before
    (left,) = json.loads(cli("verify", "--json", rc=7).stdout)["findings"]
    assert (left["filename"], left["what"][:27]) == (".filling", "left by an interrupted fill")
    index.stopped, first = "", [*index.asked]
    index.asked.clear()
    cli("wheelhouse", "fill", env=alone_with(index))
    assert {name.partition("-")[0] for name, _begin in first} == {"leaf", "torch", "typing_thing"}
    assert [name for name, _begin in index.asked] == [torch.name]
    assert index.asked[0][1] >= kept
    assert locked(house) == ["leaf==1.0", f"nvidia-nccl-cu13=={OURS}", *ALL[4:]]
    assert "all as listed" in cli("verify").stdout
    assert not (house / ".filling").exists()

    index.asked.clear()
    cli("wheelhouse", "fill", env=alone_with(index))
    assert index.asked == []


def test_sizes_come_first(world, index, house, cli, small_disk, offered, tmp_path):
    """With them it is known before a download that it does not fit."""
    world()
    offered("leaf", "1.0", files={"large.bin": os.urandom(3_900_000)})
    total = sum(
        next((tmp_path / "offered").glob(name)).stat().st_size
        for name in ("torch-*", "leaf-*", "typing_thing-2*", "only_there-*", "for_new-*")
    )
    disk = small_disk("size=2m") / "house"
    shutil.copytree(house, disk)
    before = contents(disk)
    said = cli("wheelhouse", "fill", "--dir", disk, env=alone_with(index), rc=7).stderr
    assert f"to download: 5, {total / 1e6:,.0f} MB; free: 2 MB" in said
    assert f"house: the disk has no room for {total / 1e6:,.0f} MB of dependencies" in said
    assert index.asked == []
    assert contents(disk) == before
    assert not (disk / ".filling").exists()

    said = cli("wheelhouse", "fill", env=alone_with(index)).stderr
    assert f"to download: 5, {total / 1e6:,.0f} MB; free: " in said
    assert len(index.asked) == 5


def test_what_was_fetched_for_a_build_is_not_downloaded(world, index, house, cli, tmp_path):
    """What is there under the name of a wheel, and is another file, is downloaded."""
    world()
    cache = tmp_path / "cache/sdists"
    cache.mkdir(parents=True)
    leaf, torch = "leaf-1.0-py3-none-any.whl", f"torch-2.11.0-{HERE}.whl"
    shutil.copy(tmp_path / "offered" / torch, cache)
    (cache / leaf).write_bytes(b"another")
    env = {**alone_with(index), "PATCHKIT_CACHE_DIR": str(tmp_path / "cache")}
    assert "to download: 4," in cli("wheelhouse", "fill", env=env).stderr
    asked = {name for name, _begin in index.asked}
    assert leaf in asked
    assert torch not in asked
    assert (house / torch).samefile(cache / torch)
    assert (cache / leaf).read_bytes() == b"another"
    assert "all as listed" in cli("verify").stdout


def test_what_an_earlier_run_downloaded_is_taken(world, fill, house, tmp_path):
    world()
    leaf, half = "leaf-1.0-py3-none-any.whl", "typing_thing-2.0-py3-none-any.whl"
    (house / ".filling").mkdir()
    (house / ".filling" / leaf).write_bytes((tmp_path / "offered" / leaf).read_bytes())
    (house / ".filling" / half).write_bytes((tmp_path / "offered" / half).read_bytes()[:50])
    number = (house / ".filling" / leaf).stat().st_ino
    fill()
    assert (house / leaf).stat().st_ino == number
    assert (house / half).read_bytes() == (tmp_path / "offered" / half).read_bytes()


def test_a_full_disk(small_disk, built, offered, cli, fill, tmp_path):
    disk = small_disk("size=300k") / "house"
    add(disk, write_wheel(tmp_path / "made", "1.0", project="vllm", requires=["large"]), FACTS)
    offered("large", "1.0", files={"large.bin": os.urandom(400_000)})
    before = contents(disk)
    assert "No space left on device" in fill("--dir", disk, rc=7).stderr
    assert contents(disk) == before
    assert "all as listed" in cli("verify", disk).stdout


def test_a_build_takes_the_place_of_stock(built, offered, fill, house, cli):
    built("0.25.1", project="vllm", requires=["torch==2.11.0"])
    offered("torch", "2.11.0", HERE, requires=["nvidia-nccl-cu13==2.28.9"], files=TORCH)
    offered("nvidia-nccl-cu13", "2.28.9", HERE)
    fill()
    assert "nvidia-nccl-cu13==2.28.9" in locked(house)
    built(OURS)
    assert f"nvidia-nccl-cu13=={OURS}" in locked(house)
    assert "2 wheels and 1 dependency, all as listed" in cli("verify").stdout


def test_a_wheel_that_was_changed_since(world, fill, house):
    world()
    wheel = next(house.glob("vllm*"))
    wheel.write_bytes(wheel.read_bytes() + b"0")
    assert f"{wheel.name} is not the wheel that was built" in fill(rc=8).stderr


def test_an_index_that_does_not_answer(world, cli, house):
    world()
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
    before = contents(house)
    alone = {**nowhere, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    said = cli("wheelhouse", "fill", rc=7, env=alone).stderr
    assert "the package index cannot be reached" in said
    assert contents(house) == before


def test_from_the_package_index(built, cli, house, tmp_path, environment, node):
    """A stand-in for vLLM with real dependencies, some of them with compiled code."""
    tag = f"py3-none-manylinux_2_17_{CPU}"
    requires = ["markupsafe", "pyyaml", "packaging", f"tqdm; platform_machine == '{CPU}'"]
    requires += [f"gone-from-here; platform_machine == '{OTHER_CPU}'"]
    built("0.25.1", project="vllm", tag=tag, requires=requires)
    built(OURS, tag=tag)
    command = [sys.executable, "-m", "patchkit", "wheelhouse", "fill"]
    command += ["--python-version", THIS, "--glibc", "2.31"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    if done.returncode == 7 and "cannot be reached" in done.stderr:
        pytest.skip(done.stderr.splitlines()[0])
    assert done.returncode == 0, done.stderr
    names = [line.partition("==")[0] for line in locked(house)]
    assert names == ["markupsafe", "nvidia-nccl-cu13", "packaging", "pyyaml", "tqdm", "vllm"]
    assert "all as listed" in cli("verify").stdout
    node("install", "--no-index", *LOCK)
    assert installed(node) == locked(house)
    assert "No broken requirements found" in node("check")
