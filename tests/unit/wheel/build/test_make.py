"""Running a build: what it sees, what is told while it runs, and what it leaves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import patchkit
from patchkit.errors import BuildError, HostError
from patchkit.wheel.build.make import (
    count_compiled,
    drop_partial,
    nccl_environment,
    ninja_steps,
    objects_to_make,
    run_build,
)
from patchkit.wheel.build.toolchain import Toolchain
from support.needed import need

ENV = {"PATH": os.environ["PATH"]}
PACKAGE = str(Path(patchkit.__file__).parents[1])
HERE = Path("/usr")
TOOLS = Toolchain(
    machine="aarch64",
    nvcc=HERE / "bin/nvcc",
    cuda="13.0.88",
    cxx=HERE / "bin/g++",
    compiler="g++",
    include=HERE / "include",
    lib=HERE / "lib",
    locked=False,
)
# Each would change what compilers, make, CMake or Python do.
FOREIGN = (
    *("CXX", "CXXFLAGS", "CPPFLAGS", "CFLAGS", "LIBRARY_PATH", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "GCC_EXEC_PREFIX", "COMPILER_PATH"),
    *("NVCC_PREPEND_FLAGS", "NVCC_GENCODE", "NVCC_CCBIN", "CUDA_HOME", "CUDAARCHS", "CUDAHOSTCXX"),
    *("MAKEFLAGS", "MFLAGS", "GNUMAKEFLAGS", "MAKEFILES", "BUILDDIR", "DEBUG", "VERBOSE"),
    *("CMAKE_GENERATOR", "CMAKE_ARGS", "SKBUILD_CMAKE_ARGS", "PYTHONPATH", "PYTHONHOME"),
    *("LANG", "LC_MESSAGES", "LANGUAGE", "GIT_DIR", "NCCL_GIT_COMMIT_HASH", "PIP_INDEX_URL"),
)


def test_nothing_of_the_callers_decides(monkeypatch, tmp_path):
    for name in FOREIGN:
        monkeypatch.setenv(name, "the caller's")
    for name in ("HOME", "TMPDIR", "CCACHE_DIR"):
        monkeypatch.setenv(name, f"/{name}")
    monkeypatch.setenv("LDFLAGS", "-L/the/callers")
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    seen = nccl_environment(tmp_path / "root", TOOLS)
    assert not {*FOREIGN} & {*seen}
    assert seen.pop("PATH").endswith(os.environ["PATH"])
    for optional in ("VIRTUAL_ENV", "CCACHE_CONFIGPATH", "CCACHE_DISABLE"):
        seen.pop(optional, None)
    assert seen == {
        "HOME": "/HOME",
        "TMPDIR": "/TMPDIR",
        "CCACHE_DIR": "/CCACHE_DIR",
        "LC_ALL": "C",
        "TZ": "UTC",
        "SOURCE_DATE_EPOCH": "315532800",
        "PYTHONHASHSEED": "0",
        "LDFLAGS": "-Wl,-s -Wl,--build-id=sha1 -Wl,-z,defs",
        "NVCC_APPEND_FLAGS": "-frandom-seed=patchkit",
        "GIT_CEILING_DIRECTORIES": str(tmp_path),
        "CCACHE_NAMESPACE": "patchkit-nccl-seeded",
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
    }


@pytest.fixture
def make(tmp_path):
    """Run a Makefile of these rules for ``all``: what progress was told, and the log."""
    need("make")

    def done(rules, *, total=0, jobs=1):
        told = []
        (tmp_path / "Makefile").write_text(rules.replace("    ", "\t"))
        env = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
        try:
            command = ["make", f"-j{jobs}", "all"]
            run_build(command, tmp_path, env, count_compiled(total), lambda *now: told.append(now))
        finally:
            make_log.append((tmp_path / "log.txt").read_text())
        return told

    make_log = []
    done.log = make_log
    return done


FOUR = "all: a b c d\na b c d:\n    @echo 'Compiling  $@.cc'\n    @echo Compilingless\n"


@pytest.mark.parametrize(
    ("total", "told"),
    [
        (4, [(1, 4), (2, 4), (3, 4), (4, 4), (4, 4)]),
        (2, [(1, 2), (2, 2), (2, 2), (2, 2), (2, 2)]),  # never more than all
        (9, [(1, 9), (2, 9), (3, 9), (4, 9), (9, 9)]),  # done is done
        (0, [(0, 1), (0, 1), (0, 1), (0, 1), (1, 1)]),  # make could not tell
    ],
)
def test_progress(make, total, told):
    assert make(FOUR, total=total) == told


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[1/105] Building CUDA object CMakeFiles/a.dir/a.cu.o\n", (1, 105)),
        ("[105/105] Linking CXX shared module _C.abi3.so\n", (105, 105)),
        ("-- Building Marlin kernels for archs: 12.1a\n", None),
        ("x [1/2] y\n", None),
        ("[1/2]\n", None),
    ],
)
def test_ninja_tells_its_steps(line, told):
    assert ninja_steps(line) == told


def test_the_log_is_whole(make):
    make("all:\n    @seq 2000\n    @printf '\\377\\n'; echo err >&2; printf end\n")
    lines = [*map(str, range(1, 2001)), "\N{REPLACEMENT CHARACTER}", "err", "end"]
    assert make.log == ["\n".join(lines)]


def test_the_log_grows_line_by_line(tmp_path):
    """Whoever follows a build of half an hour, or looks after a kill, sees where it is."""
    code = (
        "import os, sys; from pathlib import Path\n"
        "from patchkit.wheel.build.make import count_compiled, run_build\n"
        "command = ['sh', '-c', 'echo begun; read line <fifo; echo ended']\n"
        "run_build(command, Path.cwd(), dict(os.environ), count_compiled(0), lambda *now: None)\n"
    )
    os.mkfifo(tmp_path / "fifo")
    log, deadline = tmp_path / "log.txt", time.monotonic() + 20
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=tmp_path, env={**ENV, "PYTHONPATH": PACKAGE}) as process:
        while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        begun = log.read_text()
        (tmp_path / "fifo").write_text("\n")
        assert process.wait() == 0
    assert begun == "begun\n"
    assert log.read_text() == "begun\nended\n"


def test_a_failing_build_tells_why(make, tmp_path):
    need("g++")
    (tmp_path / "bad.cc").write_text("int main() { return unknown; }\n")
    rules = "all: bad.o\nbad.o: bad.cc\n    @seq 100\n    @g++ -c $< -o $@\n    @seq 100\n"
    with pytest.raises(BuildError) as failed:
        make(rules)
    said = failed.value
    assert said.exit_code == 10
    first, *lines = said.what.split("\n")
    assert first == "the build ended with 2"
    assert lines[0].startswith("    bad.cc:1:21: error: ")
    assert "unknown" in lines[0]
    assert lines[1].startswith("    make: *** [Makefile:")
    assert len(lines) == 2
    assert said.why == ""
    log = f"the whole log is {tmp_path}/log.txt"
    assert said.hint == f"{log}; run again to go on from here, with --fresh to begin anew"


def test_a_compiler_that_memory_ended(make):
    with pytest.raises(BuildError, match="ran out of memory") as failed:
        make("all:\n    @echo 'Compiling  x.cu'; sh -c 'kill -KILL $$$$'\n")
    assert "use fewer --jobs" in failed.value.hint
    assert "Killed" in failed.value.what


def test_a_command_that_is_not_there(tmp_path):
    with pytest.raises(HostError, match="/no/such/make does not run"):
        run_build(["/no/such/make"], tmp_path, {}, count_compiled(0), lambda *_now: None)


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_the_callers_umask_does_not_matter(make, tmp_path, mask):
    old = os.umask(mask)
    try:
        make("all:\n    @mkdir folder; touch folder/file\n")
    finally:
        os.umask(old)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("folder", "folder/file")]
    assert modes == [0o755, 0o644]


# What a killed build leaves


@pytest.fixture
def small(tmp_path):
    """A root as builds have it, with the small stand-in of NCCL."""
    need("make")
    source = Path(__file__).parents[3] / "data/nccl_small"
    shutil.copytree(source, tmp_path / "root/source")
    return tmp_path / "root"


def test_objects_to_make(small):
    assert objects_to_make(small, ENV, "") == 3
    assert (small / "build/obj/gensrc/rules.mk").read_text() == "KERNELS := sum max\n"
    (small / "build/obj/init.o").write_text("")
    (small / "build/include").mkdir()
    (small / "build/include/nccl.h").write_text("")
    os.utime(small / "build/include/nccl.h", (1, 1))
    os.utime(small / "source/src/nccl.h.in", (0, 0))
    os.utime(small / "source/makefiles/version.mk", (0, 0))
    assert objects_to_make(small, ENV, "") == 2


def test_objects_to_make_of_a_reduced_build(small):
    assert objects_to_make(small, ENV, "sum") == 2


def test_a_generator_that_was_cut_short(small):
    """Its folder is there and newer, so make takes it for done: a library without kernels."""
    script = small / "source/src/device/generate.sh"
    whole = script.read_text()
    script.write_text(whole.replace("# A module", 'touch "$1/sum.cu"; exit 1\n# A module', 1))
    objects_to_make(small, ENV, "")
    assert (small / "build/obj/gensrc/sum.cu").read_text() == ""
    script.write_text(whole)
    os.utime(script, (0, 0))
    assert objects_to_make(small, ENV, "") == 3
    assert "atomicAdd" in (small / "build/obj/gensrc/sum.cu").read_text()


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """A real object and a real library, as bytes."""
    need("gcc")
    folder = tmp_path_factory.mktemp("real")
    (folder / "code.c").write_text("int answer = 42; int get(void) { return answer; }\n")
    for command in ("gcc -g -fPIC -c code.c -o code.o", "gcc -shared code.o -o libcode.so.2.27.7"):
        subprocess.run(command.split(), cwd=folder, check=True)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".c"}


def headless(data):
    """As it is before the header is written: that comes last."""
    return bytes(64) + data[64:]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: data[:40],
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        headless,
        lambda data: data[:40] + bytes(8) + data[48:],
    ],
)
@pytest.mark.parametrize("name", ["code.o", "libcode.so.2.27.7"])
def test_unfinished_output_goes_and_finished_stays(real, tmp_path, name, spoil):
    whole, half = tmp_path / "obj/whole" / name, tmp_path / "obj/half" / name
    for place, data in ((whole, real[name]), (half, spoil(real[name]))):
        place.parent.mkdir(parents=True)
        place.write_bytes(data)
    (tmp_path / "libcode.so").symlink_to("nowhere")
    drop_partial(tmp_path)
    assert not half.exists()
    assert whole.read_bytes() == real[name]
    assert (tmp_path / "libcode.so").is_symlink()


def test_a_linker_that_is_killed_leaves_what_is_dropped(tmp_path):
    """Not what we think that a linker writes last, but what one has written when it is killed."""
    need("gcc", "ld")
    (tmp_path / "big.s").write_text(".data\n.fill 60000000,1,1\n")
    subprocess.run(["gcc", "-c", "big.s", "-o", "big.o"], cwd=tmp_path, check=True)
    linker = subprocess.Popen(["ld", "-shared", "big.o", "-o", "big.so"], cwd=tmp_path)
    place, deadline = tmp_path / "big.so", time.monotonic() + 20
    while not (place.exists() and place.stat().st_blocks) and time.monotonic() < deadline:
        pass
    linker.kill()
    if linker.wait() == 0:
        pytest.skip("the linker was done before it could be killed")
    drop_partial(tmp_path)
    assert not place.exists()
    assert (tmp_path / "big.o").exists()


def test_what_lacks_a_part_does_not_link(make, tmp_path):
    """By itself a library may lack what it calls, and shows it when it is loaded."""
    need("gcc")
    flags = nccl_environment(tmp_path, TOOLS)["LDFLAGS"]
    (tmp_path / "x.c").write_text("void kernel(void); void all(void) { kernel(); }\n")
    with pytest.raises(BuildError, match="undefined reference to `kernel'"):
        make(f"all:\n    @gcc -shared -fPIC x.c -o x.so {flags}\n")


def test_a_tool_that_does_not_say_that_the_disk_is_full(small_disk):
    disk = small_disk("size=1m,mode=755")
    command = ["sh", "-c", "head -c 2000000 /dev/zero >file 2>/dev/null"]
    with pytest.raises(BuildError, match=f"the disk of {disk} is full"):
        run_build(command, disk, ENV, count_compiled(0), lambda *_now: None)


def test_a_full_disk_of_a_failure_is_not_made_up(make):
    with pytest.raises(BuildError) as failed:
        make("all:\n    @false\n")
    assert failed.value.why == ""
