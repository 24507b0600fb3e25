"""`patchkit build flashinfer`, from a release's sdist to a wheel that this release finds.

The cheapest module is compiled by real nvcc: twenty seconds of a processor each time. Nothing of it
runs: there is no GPU.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import patchkit
from patchkit.records import RECIPES
from patchkit.runtime.rules.presets import named_preset
from patchkit.runtime.serve.command_notes import MODULES
from support import run_program
from support.building import HERE, PATCHKIT, QUIET, wheels
from support.comparing import first_member
from support.needed import need
from support.wheels import OTHER_CPU

PAGE = {"function": "flashinfer.jit.page:gen_page_module", "arguments": {}}
OLD, NEW = "0.6.13", "0.7.2.post1"
SCRIPTS = RECIPES / "flashinfer"
FUNCTION = "append_paged_kv_cache"

# What FlashInfer does when a module is asked for: 0.6 loads what is there, 0.7 tries to.
ASK = f"""
import json, sys
sys.path.insert(0, {str(SCRIPTS)!r})
import jit_modules
jit_modules._stand_in_torch("13.0")
jit_modules._import_core()
spec = jit_modules._make_spec({PAGE!r})
module = getattr(spec, "try_load", spec.build_and_load)()
print(module is not None and module.get_function({FUNCTION!r}) is not None)
"""

LOADER = """
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char **names) {
  for (int i = 1; i < count; i++)
    if (!dlopen(names[i], RTLD_NOW | RTLD_GLOBAL)) { puts(dlerror()); return 1; }
  return !dlsym(RTLD_DEFAULT, "__tvm_ffi_append_paged_kv_cache");
}
"""


def build(work, house, release, machine, *more):
    arguments = ["--version", release, "--module", "page", "--cpu", machine]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(patchkit.__file__).parents[1]),
        **QUIET,
    }
    done = run_program(
        *PATCHKIT,
        work,
        *("build", "flashinfer", *arguments, "--dir", house, "--json", *more),
        env=environment,
    )
    (wheel,) = wheels(house)
    return SimpleNamespace(wheel=wheel, shown=json.loads(done.stdout))


@pytest.fixture(scope="module")
def built(toolchain, tmp_path_factory):
    """A build for a CPU, made once: ``built(NEW, "x86_64")``; its work folder stays."""
    pytest.importorskip("tvm_ffi", reason="pip install apache-tvm-ffi==0.1.11")
    known = {}

    def make(release, machine):
        toolchain(machine)
        key = (release, machine)
        if key not in known:
            home = tmp_path_factory.mktemp(release)
            known[key] = build(home / "work", home / "house", release, machine)
            known[key].home = home
            (known[key].root,) = (home / "work").glob("flashinfer-*")
        return known[key]

    return make


@pytest.mark.e2e
@pytest.mark.parametrize("release", [OLD, NEW])
def test_the_release_finds_its_modules_without_a_compiler(built, cli, release):
    made = built(release, HERE)
    facts = made.shown["facts"]
    assert facts["modules"] == ["page"]
    assert "jit_jobs: applied" in facts["fixes"]
    assert made.wheel.name.startswith(
        f"flashinfer_jit_cache-{release}+cu130.gb10.{facts['wheel'][-10:]}-py3-none-many"
    )
    cli("verify", made.wheel.parent)
    shown = cli("inspect", made.wheel, "--target", "gb10", "--json").stdout
    assert '"sm_121a"' in shown

    installed = made.home / "installed"
    shutil.unpack_archive(made.wheel, installed, "zip")
    # A provider for 12.1 alone is hidden for others; 0.6 does not look.
    for archs, is_found in {"12.1a": True, "12.0f": release == OLD}.items():
        environment = {
            "PATH": "/nonexistent",
            "CUDA_HOME": "/nonexistent",
            "LD_LIBRARY_PATH": str(made.root / "cuda" / "lib"),
            "FLASHINFER_DISABLE_JIT": "1",
            "FLASHINFER_CUDA_ARCH_LIST": archs,
            "FLASHINFER_WORKSPACE_BASE": str(made.home / "cache"),
            "PYTHONPATH": f"{installed}:{made.root / 'site'}:{made.root / 'source'}",
        }
        told = run_program(sys.executable, "-c", ASK, env=environment).stdout
        assert told.split() == [str(is_found)]


@pytest.mark.e2e
def test_the_same_bytes_twice(built, tmp_path):
    made = built(NEW, HERE)
    aside = made.home / "aside"
    work = made.home / "work"
    work.rename(aside)
    try:
        again = build(work, tmp_path / "house", NEW, HERE, "--jobs", "3")
    finally:
        shutil.rmtree(work, ignore_errors=True)
        aside.rename(work)
    assert first_member(made.wheel, again.wheel) == ""


@pytest.mark.e2e
@pytest.mark.skipif(HERE != "x86_64", reason="an Arm machine builds for itself")
def test_built_across_it_loads_under_emulation(built, cli, tmp_path):
    need("aarch64-linux-gnu-gcc")
    program = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if not program:
        pytest.skip("qemu-aarch64 is not installed: apt install qemu-user")
    made = built(NEW, OTHER_CPU)
    cli("verify", made.wheel.parent)

    words = ["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    words += [f"--platform=manylinux_2_{minor}_aarch64" for minor in (24, 28)]
    words += ["--python-version=3.12", f"--dest={tmp_path}", "apache-tvm-ffi==0.1.11"]
    if subprocess.run([sys.executable, *words], check=False).returncode:
        pytest.skip("the index has no apache-tvm-ffi for aarch64")
    for wheel in (*tmp_path.glob("*.whl"), made.wheel):
        shutil.unpack_archive(wheel, tmp_path / "installed", "zip")

    loader = tmp_path / "loader"
    (tmp_path / "loader.c").write_text(LOADER)
    run_program("aarch64-linux-gnu-gcc", tmp_path / "loader.c", "-o", loader)
    libraries = [
        next((tmp_path / "installed").rglob("libtvm_ffi.so")),
        made.root / "cuda" / "lib" / "libcudart.so.13",
        next((tmp_path / "installed").rglob("page.so")),
    ]
    run_program(program, "-L", "/usr/aarch64-linux-gnu", loader, *libraries)


PLANNED = (0, 9)  # 9 where this machine has no compiler


@pytest.mark.parametrize(
    ("words", "rc", "says"),
    [
        ([], 2, "its wheels pin no release of FlashInfer"),
        (["--version", "0.7.4"], 2, "FlashInfer 0.7.4 has none of small"),
        (["--version", OLD, "--module", "xqa_fp8"], 2, "has none of xqa_fp8"),
        (["--version", NEW, "--module", "sparse"], 2, "--module takes batch_prefill"),
        (["--version", NEW, "--for", "some/model"], 2, "no preset is called"),
        (
            ["--version", NEW, "--set", "moe"],
            PLANNED,
            "FlashInfer 0.7.2.post1, modules: 47",
        ),
        (
            ["--version", OLD, "--target", "h200", "--module", "sampling"],
            PLANNED,
            "modules: 1",
        ),
        (["--version", NEW, "--for", "openai/gpt-oss-120b"], PLANNED, "modules: 7"),
    ],
)
def test_what_would_be_built(cli, tmp_path, words, rc, says):
    house = tmp_path / "house"
    cpu = ["--cpu", HERE]
    done = cli("build", "flashinfer", "--dry-run", "--dir", house, *cpu, *words, rc=rc)
    assert says in done.stdout + done.stderr


def test_a_model_names_the_generators_of_its_modules():
    def of(model):
        return MODULES.generators_of(named_preset(model))

    assert of("Qwen/Qwen3.6-27B-FP8") == {"sampling"}
    assert of("openai/gpt-oss-120b") == {"sampling", "sinks", "xqa_sinks"}
    assert of("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4") == {
        *("sampling", "fused_moe_120", "fp4_gemm_cutlass_sm120"),
        *("batch_prefill_fp8", "xqa_fp8"),
    }
