"""Say what extensions are compiled with: the target's flags and folders, this build's CUDA."""

from __future__ import annotations

import ast
import os
from pathlib import Path

from . import TORCH

COMMON_NVCC_FLAGS: list[str] = next(
    ast.literal_eval(node.value)
    for node in ast.parse((TORCH / "utils/cpp_extension.py").read_bytes()).body
    if isinstance(node, ast.Assign)
    and ast.unparse(node.targets[0]) == "COMMON_NVCC_FLAGS"
)
# A build names its toolkit; one that torch would search for is the build machine's own.
CUDA_HOME: str | None = os.environ.get("CUDA_HOME")
ROCM_HOME: str | None = None


def include_paths(device_type: str = "cpu") -> list[str]:
    """Return the folders of headers: torch's, and CUDA's for the device type ``cuda``."""
    include = TORCH / "include"
    return [
        str(include),
        str(include / "torch/csrc/api/include"),
        *_cuda(device_type, "include"),
    ]


def library_paths(device_type: str = "cpu") -> list[str]:
    """Return the folders of libraries: torch's, and CUDA's for the device type ``cuda``."""
    return [str(TORCH / "lib"), *_cuda(device_type, "lib64", "lib")]


def _cuda(device_type: str, *names: str) -> list[str]:
    """Return the first of these folders that the toolkit has, or the first; [] for CPUs."""
    if device_type == "cpu":
        return []
    if device_type != "cuda" or CUDA_HOME is None:
        raise OSError(
            f"no toolkit for {device_type!r}: this build is for CUDA, from CUDA_HOME"
        )
    folders = [Path(CUDA_HOME, name) for name in names]
    return [str(next((each for each in folders if each.exists()), folders[0]))]
