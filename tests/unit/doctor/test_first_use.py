"""What a device compiles at its first use, by real libraries."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from patchkit.doctor.first_use import DeviceCodeFound, add_first_use, check_first_use
from patchkit.doctor.visit import Visit
from patchkit.errors import HostError
from patchkit.finding import Level
from patchkit.measure.device_code import look_at_device_code
from support import clusters

LIBRARIES = Path(__file__).parents[2] / "data" / "libraries"


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return clusters.reports(tmp_path_factory.mktemp("nodes"))[1][0]


def test_libraries_of_ptx_alone_are_compiled_unless_the_cache_is_filled(head, tmp_path):
    found = look_at_device_code(str(LIBRARIES), 0, str(tmp_path))
    said = DeviceCodeFound(**found)
    (finding,) = check_first_use(head, said)
    assert finding.level is Level.NOTE
    assert "default.so (2), modes.so (1) hold fat binaries that are PTX alone" in finding.what
    assert f"{tmp_path} is empty" in finding.what
    assert finding.hint.endswith(
        "`patchkit repack vllm==0.25.1 --native`, then `patchkit cluster install`"
    )
    (tmp_path / "a").write_bytes(bytes(3 << 20))
    kept = look_at_device_code(str(LIBRARIES), 0, str(tmp_path))
    (fine,) = check_first_use(head, DeviceCodeFound(**kept))
    assert (fine.level, "has 3 MiB of what was compiled" in fine.what) == (Level.OK, True)
    native = replace(said, codes={"a.so": {"sm_121": 2}, "b.so": {"kind \n5_": 1, "lto_90": 1}})
    assert [its.what for its in check_first_use(head, native)] == [
        "vLLM's libraries hold machine code for this GPU"
    ]


def test_the_variables_of_a_process_count(head, tmp_path):
    variables = {"CUDA_FORCE_PTX_JIT": "1", "CUDA_CACHE_PATH": str(tmp_path)}
    words, pipe = ["/bin/sh", "-c", "echo; read end"], subprocess.PIPE
    with subprocess.Popen(words, env=variables, stdin=pipe, stdout=pipe) as process:
        process.stdout.readline()  # its variables can be read from then on
        found = look_at_device_code(str(tmp_path), process.pid, "~/none")
        process.communicate()
    assert found == {"codes": {}, "cache": str(tmp_path), "kept": 0, "forced": "CUDA_FORCE_PTX_JIT"}
    (finding,) = check_first_use(head, DeviceCodeFound(**found))
    assert (finding.about, finding.level) == ("ptx-forced", Level.WARNING)


def test_what_is_not_known_is_not_checked(head):
    visited = Visit(findings=(), reports=(head,))
    (found,) = add_first_use(visited, look_at_device_code).findings
    assert (found.level, found.what) == (Level.UNKNOWN, "not checked: no Python with vLLM is known")
    (found,) = check_first_use(head, HostError("silent"))
    assert found.what == "not checked: silent"
