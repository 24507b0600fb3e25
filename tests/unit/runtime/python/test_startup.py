"""What is read of torch and of libraries, damaged ones too."""

from __future__ import annotations

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
