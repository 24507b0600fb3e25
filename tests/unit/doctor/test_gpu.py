"""Check what the results of the smoke test mean: OK only for what ran and was right."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from patchkit.doctor.gpu import (
    SMOKE_TEST,
    GpuNode,
    all_reduce_findings,
    find_gpu_nodes,
    gpu_findings,
    run_steps,
    try_gpus,
)
from patchkit.doctor.gpu_steps import GpuStep, run_step
from patchkit.finding import Level
from support import write_files
from support.clusters import reports
from support.needed import need

MEANT = {"NCCL_IB_HCA": "rocep1s0f0", "NCCL_SOCKET_IFNAME": "enp1s0f0np0"}
NODES = [
    GpuNode(node=node, python="", address="", variables=MEANT)
    for node in ("spark1", "spark2")
]


def rank(speed: float, **fields: object) -> GpuStep:
    figures = {
        "nccl": "2.28.9",
        "microseconds_8": 40.0,
        "gigabytes_per_second_67108864": speed,
    }
    return GpuStep(step="all-reduce", state="ok", figures=figures, **fields)  # type: ignore[arg-type]


_SOCKETS = """\
spark1:1002:1002 [0] NCCL INFO NET/Socket : Using [0]enp1s0f0np0:192.168.100.10<0>
spark1:1002:1002 [0] NCCL INFO Channel 00/0 : 1[1] -> 0[0] [receive] via NET/Socket/0
"""


def test_what_ran_names_its_kernel_and_what_it_proves() -> None:
    figures = {"error": 0.017, "bound": 0.04, "vllm": "0.25.1"}
    step = GpuStep(
        step="gpu-fp8", state="ok", kernel="CutlassFP8Kernel", figures=figures
    )
    (found,) = gpu_findings("spark1", [step])
    assert (found.level, found.about, found.where) == (Level.OK, "gpu-fp8", "spark1")
    assert found.what.startswith("CutlassFP8Kernel of vLLM 0.25.1: FP8 by tensor")
    assert "error 0.017, bound 0.04" in found.what
    assert "proves that the kernel that vLLM takes here" in found.what


@pytest.mark.parametrize("about", [step["step"] for step in SMOKE_TEST["step"]])
def test_what_did_not_run_is_unknown_and_what_failed_an_error(about: str) -> None:
    (found,) = gpu_findings(
        "a", [GpuStep(step=about, state="not-run", reason="no device")]
    )
    assert (found.level, found.what) == (Level.UNKNOWN, "not checked: no device")
    (found,) = gpu_findings(
        "a", [GpuStep(step=about, state="failed", reason="exit code 1: x")]
    )
    assert (found.level, found.about) == (Level.ERROR, about)
    assert "exit code 1: x" in found.what
    assert found.hint.count("ssh -t a") == 1
    (found,) = gpu_findings(
        "a", [GpuStep(step=about, state="ok")]
    )  # figures that are missing
    assert "?" in found.what


def test_the_words_of_a_failed_step_are_looked_at_for_known_causes() -> None:
    line = "RuntimeError: No compiled cutlass_scaled_mm for CUDA device capability: 121"
    failed = GpuStep(
        step="gpu-fp8", state="failed", reason=f"exit code 1: {line}", lines=(line,)
    )
    *causes, last = gpu_findings("spark1", [failed])
    assert last.about == "gpu-fp8"
    assert {each.where for each in causes} == {"spark1"}


def test_the_slowest_rank_counts_and_one_that_failed_or_was_not_run_leaves_no_speed() -> (
    None
):
    (found,) = all_reduce_findings(NODES, [rank(22.9), rank(11.0)])
    assert (found.about, found.level) == ("all-reduce-sums", Level.OK)
    assert "11.0 GB/s" in found.what
    failed = GpuStep(step="all-reduce", state="failed", reason="no answer within 240 s")
    silent = GpuStep(
        step="all-reduce", state="not-run", reason="torch sees no CUDA device"
    )
    first, second = all_reduce_findings(NODES, [failed, silent])
    assert (first.about, first.where) == ("all-reduce-failed", "spark1")
    assert (second.about, second.where, second.level) == (
        "all-reduce",
        "spark2",
        Level.UNKNOWN,
    )


def test_sockets_beside_an_env_file_that_meant_roce_are_an_error() -> None:
    ranks = [rank(3.8, lines=tuple(_SOCKETS.splitlines()))] * 2
    found = [*all_reduce_findings(NODES, ranks)]
    assert [each.about for each in found] == [
        "all-reduce-sums",
        "nccl-socket",
        "nccl-socket",
    ]


def test_nodes_whose_gpus_are_not_reached_are_not_checked(tmp_path: Path) -> None:
    """Of this machine, with a Python that has a torch which does not load."""
    python = f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n'
    torch = "raise ImportError('no torch')"
    write_files(tmp_path, {"torch.py": torch, "venv/bin/python": python}, mode=0o755)
    nodes = []
    for each in reports(tmp_path / "hosts")[1]:
        assert each.facts
        facts = replace(each.facts, venv=str(tmp_path / "venv"))
        nodes.append(replace(each, node="localhost", facts=facts))
    found = [*try_gpus(nodes)]
    steps = [step["step"] for step in SMOKE_TEST["step"]]
    assert [each.about for each in found] == [*steps, *steps, "all-reduce"]
    assert {each.level for each in found} == {Level.UNKNOWN}
    assert {each.what for each in found[:-1]} == {
        "not checked: torch cannot be imported: no torch"
    }
    assert found[-1].what == "not checked: the GPU of localhost was not reached"


def test_of_a_node_that_does_not_answer_each_step_says_so() -> None:
    need("ssh")
    node = GpuNode(node="nobody.invalid", python="", address="", variables={})
    steps = run_steps(node, SMOKE_TEST["step"])
    assert [step.step for step in steps] == [row["step"] for row in SMOKE_TEST["step"]]
    assert {step.state for step in steps} == {"not-run"}
    assert "nobody.invalid" in steps[0].reason


def test_without_env_files_nccl_is_told_the_interface_of_the_address(
    tmp_path: Path,
) -> None:
    nodes = reports(tmp_path)[1]
    for placed, name in ((nodes[0].placed, "enp1s0f0np0"), (None, "=enp1s0f0np0")):
        (node,) = find_gpu_nodes([replace(nodes[0], placed=placed)])
        assert node.variables["NCCL_SOCKET_IFNAME"] == name


# Each step in a process of its own

_NO_GPU = """\
class version:
    cuda = "13.0"
class cuda:
    def is_available(): return False
    def init(): raise RuntimeError("Found no NVIDIA driver on your system.\\nmore words")
"""


@pytest.mark.parametrize(
    ("torch", "seconds", "state", "reason"),
    [
        (_NO_GPU, 30, "not-run", "torch sees no CUDA device: Found no NVIDIA driver"),
        ("import os; os.abort()", 30, "failed", "killed by SIGABRT: "),
        ("import time; time.sleep(60)", 1, "failed", "no answer within 1 s"),
        (
            "raise RuntimeError('CUDA x')",
            30,
            "failed",
            "exit code 1: RuntimeError: CUDA x",
        ),
        ("", 30, "not-run", "vLLM, torch or Triton is called otherwise here: "),
        (
            "import os; os._exit(0)",
            30,
            "failed",
            "it ended without an answer: it printed nothing",
        ),
    ],
)
def test_what_happens_to_a_process_is_its_result(
    tmp_path: Path, torch: str, seconds: int, state: str, reason: str
) -> None:
    (tmp_path / "torch.py").write_text(torch, encoding="utf-8")
    settings = {"step": "gpu-device", "script": "cuda", "seconds": seconds}
    found = run_step(sys.executable, settings, {"PYTHONPATH": str(tmp_path)})
    assert (found.state, found.reason.startswith(reason)) == (state, True), found


def test_a_step_that_fails_names_the_kernels_that_vllm_chose(tmp_path: Path) -> None:
    torch = """\
print("INFO [fp8.py:1] Selected CutlassFP8ScaledMMLinearKernel for Fp8LinearMethod")
print("INFO [nvfp4.py:7] Using 'MARLIN' NvFp4 MoE backend out of potential ones")
raise RuntimeError("CUDA x")
"""
    (tmp_path / "torch.py").write_text(torch, encoding="utf-8")
    settings = {
        "step": "routing-x",
        "script": "cuda",
        "seconds": 30,
        "variables": {"PYTHONPATH": str(tmp_path)},
    }
    found = run_step(sys.executable, settings, {"PYTHONPATH": "/nowhere"})
    assert found.kernel == "CutlassFP8ScaledMMLinearKernel, MARLIN"
    assert found.reason == "exit code 1: RuntimeError: CUDA x"


def test_a_python_that_is_not_there_and_a_child_that_outlives_its_limit(
    tmp_path: Path,
) -> None:
    found = run_step(
        "/nowhere/python", {"step": "x", "script": "cuda", "seconds": 5}, {}
    )
    reason = "/nowhere/python does not run: No such file or directory"
    assert (found.state, found.reason) == ("failed", reason)
    write_files(
        tmp_path, {"python": "#!/bin/sh\necho began\nexec sleep 60\n"}, mode=0o755
    )
    settings = {
        "step": "x",
        "script": "cuda",
        "seconds": -9,
    }  # the grace after it is 10 s
    found = run_step(str(tmp_path / "python"), settings, {})
    assert (found.state, found.lines) == ("failed", ("began",))
    assert found.reason == "no answer within -9 s"
