"""What is read of torch and of libraries, damaged ones too."""

import venv

import pytest

from patchkit.cluster.agent.node_facts import python_contents
from patchkit.runtime.python.startup import (
    ask_interpreter,
    find_preloaded,
    read_library,
)
from support import write_files
from support.vllm_wheels import LIBRARIES

LISTS = """
def f():
    for folder, pattern in [
        ("cuda_runtime", "libcudart.so.*[0-9]"),
        ('nccl', 'libnccl.so.*[0-9]'),
        ("nvshmem", "libnvshmem_host.so.*[0-9]"),
    ]: pass
"""
CALL = "    _preload_cuda_deps()\n"


@pytest.mark.parametrize(
    ("text", "files", "found"),
    [
        (
            LISTS + CALL,
            ["nvidia/cu13/lib/libcudart.so.13", "nvidia/nccl/lib/libnccl.so.2"],
            1,
        ),
        (
            LISTS + CALL,
            ["cuda_runtime/lib/libcudart.so.13", "nccl/lib/libnccl.so.2"],
            1,
        ),
        (
            LISTS + CALL,
            ["nvidia/cu12/lib/libcudart.so.12", "nvidia/nccl/lib/libnccl.so.2"],
            None,
        ),
        (
            LISTS,
            ["nvidia/cu13/lib/libcudart.so.13", "nvidia/nccl/lib/libnccl.so.2"],
            None,
        ),
    ],
)
def test_what_torch_preloads(text, files, found, tmp_path):
    for file in files:
        write_files(tmp_path / "[site]", {file: ""})
    path = [str(tmp_path), str(tmp_path / "[site]")]
    expected = str(tmp_path / "[site]" / files[found]) if found is not None else None
    assert find_preloaded(text, "13.0", path) == expected


def test_damaged_libraries_are_none(tmp_path):
    """The loader would not take them."""
    whole = (LIBRARIES / "gb10.so").read_bytes()
    place = tmp_path / "libnccl.so.2"
    place.write_bytes(whole[: len(whole) // 2])
    assert [read_library(str(path)) for path in (place, tmp_path)] == [None, None]


def installed(folder, project, version, *lines):
    about = "\n".join([f"Name: {project}", f"Version: {version}", *lines])
    write_files(folder, {f"{project}-{version}.dist-info/METADATA": about})


def test_what_a_pth_file_adds_is_installed(tmp_path):
    place = tmp_path / "venv"
    venv.create(place, symlinks=True)
    (own,) = place.glob("lib/python3*/site-packages")
    installed(own, "vllm", "0.25.1", "Requires-Dist: regex")
    shared = tmp_path / "shared"
    installed(shared, "regex", "2026.1")
    (own / "shared.pth").write_text(f"{shared}\n")

    path = ask_interpreter(f"{place}/bin/python", {}).path
    assert {str(own), str(shared)} <= {*path}
    assert python_contents(path, None).versions["regex"] == "2026.1"
