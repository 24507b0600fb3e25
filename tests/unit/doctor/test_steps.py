"""Each step in a process of its own: no GPU, no torch, a hang, a crash, an answer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from patchkit.doctor.gpu_steps import GpuStep, run_step

_NO_GPU = """\
class version:
    cuda = "13.0"
class cuda:
    def is_available(): return False
    def init(): raise RuntimeError("Found no NVIDIA driver on your system.\\nmore words")
"""


def torch_of(folder: Path, text: str) -> dict[str, str]:
    """Return variables with which ``import torch`` runs this text."""
    (folder / "torch.py").write_text(text, encoding="utf-8")
    return {"PYTHONPATH": str(folder)}


def step(variables: dict[str, str], seconds: float = 30) -> GpuStep:
    settings = {"step": "gpu-device", "script": "cuda", "seconds": seconds}
    return run_step(sys.executable, settings, variables)


@pytest.mark.parametrize(
    ("torch", "seconds", "state", "reason"),
    [
        (_NO_GPU, 30, "not-run", "torch sees no CUDA device: Found no NVIDIA driver"),
        ("raise ImportError('no')", 30, "not-run", "torch cannot be imported: no"),
        ("import os; os.abort()", 30, "failed", "killed by SIGABRT: "),
        ("import time; time.sleep(60)", 1, "failed", "no answer within 1 s"),
        (
            "raise RuntimeError('CUDA error: 999')",
            30,
            "failed",
            "exit code 1: RuntimeError: CUDA error: 999",
        ),
        ("", 30, "not-run", "vLLM, torch or Triton is called otherwise here: "),
        ("import os; os._exit(0)", 30, "failed", "it ended without an answer: it printed nothing"),
    ],
    ids=["no GPU", "absent", "crash", "hang", "error", "other", "silent"],
)
def test_what_happens_to_a_process_is_its_result(
    tmp_path: Path, torch: str, seconds: int, state: str, reason: str
) -> None:
    found = step(torch_of(tmp_path, torch), seconds)
    assert (found.state, found.reason.startswith(reason)) == (state, True), found


def test_a_python_that_is_not_there() -> None:
    found = run_step("/nowhere/python", {"step": "x", "script": "cuda", "seconds": 5}, {})
    assert found.state == "failed"
    assert found.reason == "/nowhere/python does not run: No such file or directory"


def test_a_child_that_outlives_its_limit_is_ended(tmp_path: Path) -> None:
    stubborn = tmp_path / "python"
    stubborn.write_text("#!/bin/sh\necho began\nexec sleep 60\n", encoding="utf-8")
    stubborn.chmod(0o755)
    settings = {"step": "x", "script": "cuda", "seconds": -9}  # the grace after it is 10 s
    found = run_step(str(stubborn), settings, {})
    assert (found.state, found.lines) == ("failed", ("began",))
    assert found.reason == "no answer within -9 s"
