"""What is read of torch and of libraries, damaged ones too."""

from __future__ import annotations

import subprocess
import sys
from random import Random

import pytest

from patchkit.elf import Dynamic
from patchkit.runtime.python.startup import exports_nccl, find_preloaded, read_dynamic
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
        (LISTS + CALL, ["nvidia/cu12/lib/libcudart.so.12", "nvidia/nccl/lib/libnccl.so.2"], None),
        (LISTS, ["nvidia/cu13/lib/libcudart.so.13", "nvidia/nccl/lib/libnccl.so.2"], None),
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
    assert read_dynamic(str(parts.nccl["stock"])).soname == "libnccl.so.2"
    assert exports_nccl(str(parts.nccl["stock"]))
    assert not exports_nccl(str(parts.torch["rpath"] / "libtorch_cuda.so"))
    place = tmp_path / "libnccl.so.2"
    random = Random(0)
    for _turn in range(300):
        data = bytearray(whole)
        for _flip in range(random.randrange(1, 9)):
            # Headers are where damage matters.
            start = random.choice([0, len(data) - 2048])
            data[start + random.randrange(2048 if start else 512)] = random.randrange(256)
        place.write_bytes(data[: random.choice([None, random.randrange(len(data))])])
        exports_nccl(str(place))
        assert (found := read_dynamic(str(place))) is None or isinstance(found, Dynamic)
    assert read_dynamic(str(tmp_path)) is None


@pytest.mark.parametrize("module", ["python.libnccl", "host.software", "rules.variables"])
def test_it_needs_nothing_but_the_standard_library(module):
    """Somebody who only asks imports no recipes, wheels or command line, and nothing slow."""
    code = f"import sys; old = {{*sys.modules}}; import patchkit.runtime.{module}; "
    code += "print(*({*sys.modules} - old))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = done.stdout.split()
    ours = {name.partition(".")[2] for name in names if name.startswith("patchkit.")}
    ground = {"elf", "errors", "follow", "paths", "process", "quoting", "reading", "units"}
    assert {name for name in ours if not name.startswith("runtime")} <= {*ground, "records"}
    foreign = {name.partition(".")[0] for name in names}
    assert foreign - sys.stdlib_module_names == {"patchkit"}
    assert not {"email", "asyncio", "tempfile"} & foreign
