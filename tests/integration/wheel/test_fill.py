"""Wheelhouses filled by a real pip: from folders of small wheels, and once from the index."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import venv

import pytest

from patchkit.errors import HashMismatchError, HostError
from patchkit.wheel.file.name import wheel_name
from patchkit.wheel.wheelhouse.contents import add, entries
from patchkit.wheel.wheelhouse.resolve import Locked, WheelIndex, download, place, read_report
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
    said = fill("--python", "3.12").stdout

    assert locked(house) == ALL
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

    fill("--python", "3.11")
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

    def pip(*arguments):
        command = [sys.executable, "-m", "pip", "--python", str(program), *arguments]
        done = subprocess.run(command, env=settings, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return pip


LOCK = ["--find-links", "wheelhouse", "--require-hashes", "-r", "wheelhouse/requirements.txt"]


def installed(node):
    return sorted(
        f"{e['name']}=={e['version']}".lower() for e in json.loads(node("list", "--format=json"))
    )


def test_every_node_installs_the_same(world, fill, house, node):
    world()
    fill("--python", THIS)
    node("install", "--no-index", *LOCK)
    assert installed(node) == locked(house)
    assert "No broken requirements found" in node("check")


def test_what_the_user_wants_as_well(world, offered, fill, house):
    world()
    offered("ray", "2.0")
    offered("ray", "3.0")
    fill("--with", "ray<3")
    assert "ray==2.0" in locked(house)


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
    ("requires", "there", "says"),
    [
        (["gone>=1"], (), "gone>=1: no wheel of it for CPython 3.12 on"),
        (["only-source"], (), "it is there as a source distribution alone"),
        (["other-cpu"], (("other-cpu", "1.0", ELSEWHERE),), "other-cpu: no wheel of it for"),
        (
            ["a", "b<2"],
            (("a", "1.0", "py3-none-any"), ("b", "1.0", "py3-none-any")),
            "no set of wheels",
        ),
    ],
)
def test_what_cannot_be_had(requires, there, says, built, offered, fill, house, tmp_path):
    built("0.25.1", project="vllm", requires=requires)
    (tmp_path / "offered").mkdir(exist_ok=True)
    (tmp_path / "offered/only_source-1.0.tar.gz").write_bytes(b"")
    for each in there:
        offered(*each, requires=["b>=2"] if each[0] == "a" else ())
    offered("b", "2.0")
    before = contents(house)

    said = fill(rc=3).stderr

    assert says in said
    assert contents(house) == before
    assert not (house / ".filling").exists()


def test_the_conflict_is_told_in_full(built, offered, fill):
    built("0.25.1", project="vllm", requires=["torch==2.11.0"])
    built("2.29.7+gb10.a1b2c3")
    offered("torch", "2.11.0", HERE, requires=["nvidia-nccl-cu13==2.28.9"], files=TORCH)
    offered("nvidia-nccl-cu13", "2.28.9", HERE)
    said = fill(rc=3).stderr
    assert "torch 2.11.0 depends on nvidia-nccl-cu13==2.28.9" in said
    assert "2.29.7+gb10.a1b2c3" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--python", "2.7"], "--python takes a version such as 3.12, not '2.7'"),
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


def test_other_bytes_under_the_name_of_what_was_resolved(offered, tmp_path):
    offered("six", "1.0")
    wheel = Locked(name=wheel_name("six-1.0-py3-none-any.whl"), sha256="0" * 64, requires=())
    there = place(CPU, "3.12", "2.39")
    (tmp_path / "new").mkdir()
    with pytest.raises(HashMismatchError, match="other bytes") as caught:
        download(
            [wheel],
            there,
            WheelIndex(offline=True, folders=(tmp_path / "offered",)),
            tmp_path / "new",
        )
    assert "six" in caught.value.why


def test_a_pip_that_decides_for_this_machine_is_found_out():
    report = {"environment": {"platform_machine": "vax", "python_version": "3.12"}, "install": []}
    with pytest.raises(HostError, match="pip decided for vax, not for x86_64"):
        read_report(report, place("x86_64", "3.12", "2.39"))


def test_killed_while_it_downloads(world, fill, house, cli, environment, tmp_path):
    world()
    before = contents(house)
    command = [sys.executable, "-m", "patchkit", "wheelhouse", "fill", "--offline"]
    command += ["--find-links", tmp_path / "offered"]
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=tmp_path,
        env={**environment, "PIP_CONFIG_FILE": os.devnull},
        start_new_session=True,
    )
    while not (house / ".filling/pip").exists():
        time.sleep(0.01)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()

    assert contents(house) == before
    (left,) = json.loads(cli("verify", "--json", rc=7).stdout)["findings"]
    assert (left["filename"], left["what"][:27]) == (".filling", "left by an interrupted fill")
    fill()
    assert locked(house) == ALL
    assert "all as listed" in cli("verify").stdout
    assert not (house / ".filling").exists()


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
    assert "disk space" in fill("--dir", disk, rc=7).stderr
    assert contents(disk) == before
    assert "all as listed" in cli("wheelhouse", "verify", "--dir", disk).stdout


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
    command += ["--python", THIS, "--glibc", "2.31"]
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
