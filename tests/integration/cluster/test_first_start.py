"""Compile what a first start lacks, with FlashInfer and ninja; nvcc and torch are stand-ins."""

import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from zipfile import ZipFile

import pytest

from patchkit.cluster.agent import node_state
from patchkit.cluster.agent.node_state import JournalLine, compile_modules
from patchkit.doctor.symptoms.findings import explain_failed_start
from patchkit.runtime.host.host import FlashInfer, Memory
from patchkit.runtime.host.software import find_flashinfer
from patchkit.runtime.rules.presets import load_flag_rules
from patchkit.runtime.serve.args import serve_args
from patchkit.runtime.serve.command_notes import MODULES, SCRIPT, missing_calls
from patchkit.source.releases import read_wheel_lock
from patchkit.units import KIB_PER_GIB
from support import write_files
from support.needed import need
from tools import serve_lines

VERSION = "0.6.13"
HOME = SCRIPT.parent
GENERATED = (".cache/flashinfer", VERSION, "121a/generated")
# A compiler that writes its output, and the line of a log that says so.
COMPILER = """\
#!/bin/sh
case "$*" in *--version*) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit;; esac
umask >> {log}.umask
[ -e {folder}/killed ] && kill -9 $$
[ -e {folder}/slow ] && sleep 0.2
while [ "$1" != -o ]; do shift; done
echo "$2" >> {log}
echo x > "$2"
"""
# The functions of the script that make a torch, before anything imports one.
TORCH = f"""\
import importlib.util
spec = importlib.util.spec_from_file_location("jit_modules", {str(SCRIPT)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module._stand_in_torch("13.0")
"""


def install(target, *projects):
    words = ("-m", "pip", "install", "-q", "--no-deps", "--target", target)
    options = ("--only-binary=:all:", "--disable-pip-version-check")
    done = subprocess.run(
        [sys.executable, *words, *options, *projects], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"{' '.join(projects)} cannot be had here: {done.stderr[-200:]}")


@pytest.fixture(scope="module")
def packages(fetched, tmp_path_factory):
    need("ninja")
    site = tmp_path_factory.mktemp("site")
    install(
        site,
        "apache-tvm-ffi==0.1.11",
        *("filelock", "packaging", "typing_extensions"),
    )
    wheel = fetched(
        "flashinfer-python", read_wheel_lock(HOME / "wheels.toml")["any"][VERSION]
    )
    with ZipFile(wheel) as archive:
        members = [
            name
            for name in archive.namelist()
            if name.endswith(".py") or "/csrc/" in name or "dist-info" in name
        ]
        archive.extractall(site, members)
    write_files(site, {"sitecustomize.py": TORCH})
    return site


@pytest.fixture
def machine(packages, tmp_path):
    """Variables of a machine whose compilers are stand-ins; ``log`` has what they wrote."""
    log = tmp_path / "log"
    log.touch()
    text = COMPILER.format(log=log, folder=tmp_path)
    write_files(tmp_path / "bin", {"nvcc": text, "g++": text}, mode=0o755)
    (tmp_path / "include").mkdir()
    return {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "CUDA_HOME": str(tmp_path),
        "CXX": f"{tmp_path}/bin/g++",
        "FLASHINFER_CUDA_ARCH_LIST": "12.1a",
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path / "cache"),
        "PYTHONPATH": str(packages),
    }


def calls_of(*names):
    return [asdict(call) for call in MODULES.calls(VERSION, 12, names)]


def start(machine, *names, script="", by_memory=True):
    script = script or SCRIPT.read_text()
    calls = calls_of(*names)
    return compile_modules("x", sys.executable, script, calls, machine, by_memory)


def finish(work):
    steps = []
    while True:
        try:
            steps.append(next(work))
        except StopIteration as end:
            return steps, end.value


def running(folder):
    """Return the programs that have the folder in their command lines."""
    files = Path("/proc").glob("[0-9]*/cmdline")
    texts = []
    for file in files:
        try:
            texts.append(file.read_bytes())
        except OSError:
            continue
    return [text for text in texts if os.fsencode(folder) in text and b"ninja" in text]


def test_cut_short_it_goes_on_and_then_nothing_is_left(packages, machine, tmp_path):
    log = tmp_path / "log"
    (tmp_path / "slow").touch()
    former = os.umask(0o002)
    try:
        work = start(machine, "sampling", "fp4_gemm_cutlass_sm120")
        steps = [next(work) for _ in range(6)]
        work.close()
    finally:
        os.umask(former)
    assert steps[:4] == [(1, 4), (2, 4), (3, 4), (4, 4)]  # sampling first
    assert steps[4:] == [(1, 18), (2, 18)]
    assert {*Path(f"{log}.umask").read_text().split()} == {"0002"}
    time.sleep(0.5)
    assert running(tmp_path) == []

    (tmp_path / "slow").unlink()
    done = log.read_text().splitlines()
    log.write_text("")
    steps, (is_done, lines) = finish(
        start(machine, "sampling", "fp4_gemm_cutlass_sm120")
    )
    assert (is_done, lines) == (True, [])
    assert len(steps) == steps[-1][1] <= 16  # those that had ended are not made again
    assert not {*done[:4]} & {*log.read_text().splitlines()}

    log.write_text("")
    assert finish(start(machine, "sampling", "fp4_gemm_cutlass_sm120")) == (
        [],
        (True, []),
    )
    assert log.read_text() == ""

    kernels = find_flashinfer([str(packages)], machine)
    assert {*kernels.modules} == {"sampling", "fp4_gemm_cutlass_sm120"}


def test_a_killed_compiler_is_explained_and_no_error(machine, tmp_path):
    (tmp_path / "killed").touch()
    _steps, (is_done, lines) = finish(start(machine, "sampling"))
    assert not is_done
    assert any(line.startswith("FAILED: ") for line in lines)
    assert "RuntimeError: Ninja build failed." in lines

    # ninja from 1.12 on names the code.
    lines.insert(0, "FAILED: [code=137] /x/cached_ops/sampling/csrc_renorm.cuda.o")
    journal = [("x", JournalLine(time=0, unit="u", text=line)) for line in lines]
    error = explain_failed_start(journal, "")
    assert "137 is signal 9" in error.why
    assert "MAX_JOBS=4" in error.hint


def test_a_python_without_flashinfer_is_no_error():
    is_done, lines = finish(start({"PYTHONPATH": ""}, "sampling"))[1]
    assert not is_done
    python = sys.executable
    assert lines[-1] == f"{python} exit code 1: {python} has no flashinfer"


def test_a_script_that_is_killed_says_so():
    script = "import os; os.kill(os.getpid(), 9)"
    assert finish(start({}, "sampling", script=script)) == (
        [],
        (False, [f"{sys.executable} killed by SIGKILL: it printed nothing"]),
    )


def test_a_generator_that_fails_is_told_after_what_could_be_compiled(machine, tmp_path):
    full = Path(machine["FLASHINFER_WORKSPACE_BASE"], *GENERATED)
    full.mkdir(parents=True)
    (full / "gen_gemm_sm120_cutlass_fp4").touch()  # where the generator makes a folder
    names = ("sampling", "fp4_gemm_cutlass_sm120")
    steps, (is_done, lines) = finish(start(machine, *names))
    assert steps[-1] == (4, 4)
    assert not is_done
    assert "FileExistsError: " in lines[-1]


def test_max_jobs_of_a_user_decides(machine, tmp_path):
    """Compilers end here as soon as they begin, so ninja's own words tell the number."""
    ninja = f'#!/bin/sh\necho "$@" >> {tmp_path}/told\n'
    write_files(tmp_path / "bin", {"ninja": ninja}, mode=0o755)
    script = SCRIPT.read_text().replace("Path(sys.executable).parent", "''")
    for by_memory in (False, True):
        variables = {**machine, "MAX_JOBS": "77"}
        work = start(variables, "sampling", script=script, by_memory=by_memory)
        assert finish(work)[1] == (True, [])
    decided, by_memory = (tmp_path / "told").read_text().splitlines()
    assert decided.endswith(" -j 77")
    assert not by_memory.endswith(" -j 77")


@pytest.mark.parametrize(
    ("gib", "cores", "jobs"),
    [(116, 20, [20, 10]), (45, 20, [20, 3]), (14, 20, [4, 1]), (4, 20, [1, 1])],
)
def test_as_many_compilers_as_memory_holds(gib, cores, jobs, tmp_path, monkeypatch):
    """The numbers are those of the fix jit_jobs."""
    memory = Memory(total=128 * KIB_PER_GIB, available=gib * KIB_PER_GIB)
    monkeypatch.setattr(node_state, "read_memory", lambda _reader: memory)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: range(cores))
    write_files(tmp_path, {"python": "#!/bin/sh\ncat >&2\nexit 1\n"}, mode=0o755)
    calls = calls_of("sampling", "fused_moe_120")
    work = compile_modules("x", str(tmp_path / "python"), "", calls, {}, True)
    _steps, (is_done, _lines) = finish(work)
    assert not is_done
    assert [call["jobs"] for call in calls] == jobs


@pytest.mark.parametrize(
    ("model", "compiled", "functions"),
    [
        ("Qwen/Qwen3.6-27B-FP8", [], ["gen_sampling_module"]),
        ("Qwen/Qwen3.6-27B-FP8", ["sampling"], []),
        (
            "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
            ["sampling"],
            ["gen_cutlass_fused_moe_sm120_module", "gen_gemm_sm120_module_cutlass_fp4"],
        ),
        ("openai/gpt-oss-120b", ["sampling"], []),
    ],
)
def test_what_heads_decide_is_left_to_the_start(model, compiled, functions):
    request = serve_lines.request("0.33.0", {"model": model})
    kernels = FlashInfer(version="0.7.2.post1", modules=tuple(compiled), facts={})
    request = replace(request, node=replace(request.node, kernels=kernels))
    modules = serve_args(request, load_flag_rules()).modules
    calls = missing_calls(request.node, modules)
    assert sorted(call.function.partition(":")[2] for call in calls) == functions
    assert missing_calls(replace(request.node, kernels=None), modules) == []
