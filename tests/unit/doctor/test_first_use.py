"""Say what a device compiles at its first use, by real libraries."""

import subprocess
from dataclasses import replace
from pathlib import Path

from patchkit.doctor.first_use import DeviceCodeFound, add_first_use, check_first_use
from patchkit.doctor.visit import Visit
from patchkit.finding import Level
from patchkit.measure.device_code import look_at_device_code
from support import clusters

LIBRARIES = Path(__file__).parents[2] / "data" / "libraries"


def test_libraries_of_ptx_alone_are_compiled_unless_the_cache_is_filled(tmp_path):
    _, (head, _worker) = clusters.reports(tmp_path)
    cache = tmp_path / "cache"
    said = DeviceCodeFound(**look_at_device_code(str(LIBRARIES), 0, str(cache)))
    (note,) = check_first_use(head, said)
    assert (note.level, f"{cache} is empty" in note.what) == (Level.NOTE, True)
    assert "default.so (2), modes.so (1) hold fat binaries that are PTX alone" in note.what
    assert "patchkit repack vllm==0.25.1 --native" in note.hint
    native = {"a.so": {"sm_121": 2}, "b.so": {"kind \n5_": 1, "lto_90": 1}}
    for others in ({"kept": 3 << 20}, {"codes": native}):
        (fine,) = check_first_use(head, replace(said, **others))
        assert fine.level is Level.OK
    visited = Visit(findings=(), reports=(head,))  # its Python is none of this machine's
    (found,) = add_first_use(visited, look_at_device_code).findings
    assert (found.level, found.what) == (Level.UNKNOWN, "not checked: no Python with vLLM is known")


def test_the_variables_of_a_process_count(tmp_path):
    variables = {"CUDA_FORCE_PTX_JIT": "1", "CUDA_CACHE_PATH": str(tmp_path)}
    words, pipe = ["/bin/sh", "-c", "echo; read end"], subprocess.PIPE
    with subprocess.Popen(words, env=variables, stdin=pipe, stdout=pipe) as process:
        process.stdout.readline()  # its variables can be read from then on
        found = look_at_device_code(str(tmp_path), process.pid, "~/none")
        process.communicate()
    assert found == {"codes": {}, "cache": str(tmp_path), "kept": 0, "forced": "CUDA_FORCE_PTX_JIT"}
    _, (head, _worker) = clusters.reports(tmp_path)
    assert [its.about for its in check_first_use(head, DeviceCodeFound(**found))] == ["ptx-forced"]
