"""What is read of torch and of libraries, damaged ones too."""

from __future__ import annotations

import subprocess
import sys
from random import Random

import pytest

from patchkit.runtime.python.loader import Library, exports, read_library
from patchkit.runtime.python.startup import find_preloaded
from support.layout import compiled

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
        (LISTS + CALL, ["nvidia/cu13/lib/libcudart.so.13", "nvidia/nccl/lib/libnccl.so.2"], 1),
        (LISTS + CALL, ["cuda_runtime/lib/libcudart.so.13", "nccl/lib/libnccl.so.2"], 1),
        (LISTS + CALL, ["nvidia/cu13/lib/libcudart.so.13"], None),
        (LISTS + CALL, ["nvidia/cu12/lib/libcudart.so.12", "nvidia/nccl/lib/libnccl.so.2"], None),
        (LISTS + CALL, ["nvidia/nccl/lib/libnccl.so.2"], None),
        (LISTS, ["nvidia/cu13/lib/libcudart.so.13", "nvidia/nccl/lib/libnccl.so.2"], None),
        (CALL, ["nvidia/cu13/lib/libcudart.so.13", "nvidia/nccl/lib/libnccl.so.2"], None),
    ],
)
def test_what_torch_preloads(text, files, found, tmp_path):
    for file in files:
        (tmp_path / "[site]" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "[site]" / file).touch()
    path = [str(tmp_path), str(tmp_path / "[site]")]
    expected = str(tmp_path / "[site]" / files[found]) if found is not None else None
    assert find_preloaded(text, "13.0", path) == expected


def test_damaged_libraries_are_none(tmp_path):
    """The loader would not take them; and nothing that a file holds stops patchkit."""
    parts = compiled(tmp_path)
    whole = parts.nccl["stock"].read_bytes()
    assert read_library(str(parts.nccl["stock"])).names == {"libnccl.so.2"}
    assert exports(str(parts.nccl["stock"]), "ncclGetVersion")
    assert not exports(str(parts.torch["rpath"] / "libtorch_cuda.so"), "ncclGetVersion")
    place = tmp_path / "libnccl.so.2"
    random = Random(0)
    for _turn in range(300):
        data = bytearray(whole)
        for _flip in range(random.randrange(1, 9)):
            # Headers are where damage matters.
            start = random.choice([0, len(data) - 2048])
            data[start + random.randrange(2048 if start else 512)] = random.randrange(256)
        place.write_bytes(data[: random.choice([None, random.randrange(len(data))])])
        exports(str(place), "ncclGetVersion")
        assert (found := read_library(str(place))) is None or isinstance(found, Library)
    for nothing in (tmp_path / "none", tmp_path):
        assert read_library(str(nothing)) is None
        assert exports(str(nothing), "ncclGetVersion") is False


@pytest.mark.parametrize(
    "module", ["python.libnccl", "host.software", "rules.variables", "rules.flags"]
)
def test_it_needs_nothing_but_the_standard_library(module):
    """Somebody who only asks imports no recipes, wheels or command line, and nothing slow."""
    code = f"import sys, patchkit.runtime.{module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = done.stdout.split()
    ours = {name.partition(".")[2] for name in names if name.startswith("patchkit.")}
    assert {name for name in ours if not name.startswith("runtime")} <= {
        "elf",
        "errors",
        "paths",
        "process",
        "quoting",
        "reading",
        "records",
    }
    # What site-packages may bring in at any start of Python does not count.
    bare = subprocess.run(
        [sys.executable, "-c", "import sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    foreign = {name.partition(".")[0] for name in set(names) - set(bare.stdout.split())}
    assert foreign - sys.stdlib_module_names == {"patchkit"}
    assert not {"email", "asyncio", "tempfile"} & foreign
