"""The stand-in for torch: what it reads of the target's files."""

from __future__ import annotations

import venv

import pytest

from patchkit.errors import BuildError
from patchkit.process import ask
from patchkit.wheel.build.cross_torch import install_torch_stand_in
from patchkit.wheel.file.torch import installed_torch
from support.small_torch import site, small_torch

ASK = """\
import importlib.metadata, sys
import torch
import torch.utils.cpp_extension as extension
from torch.version import hip
answer = {each: eval(each) for each in sys.argv[1:]}
"""


@pytest.fixture
def target(tmp_path):
    return small_torch(tmp_path / "for the other CPU" / "site-packages")


@pytest.fixture(scope="module")
def built_in(tmp_path_factory):
    home = tmp_path_factory.mktemp("python")
    venv.create(home, with_pip=False)
    return home / "bin" / "python"


@pytest.fixture
def python(built_in, target):
    install_torch_stand_in(site(built_in), target)
    return built_in


def test_it_answers_with_what_the_files_of_the_target_say(python, target, tmp_path):
    cuda, torch = tmp_path / "cuda", target / "torch"
    expected = {
        "torch.__version__": "2.15.0+cu130",
        "torch.version.cuda": "13.0",
        "torch.version.debug": False,
        "hip": None,
        "torch.__file__": f"{torch}/__init__.py",
        "torch.compiled_with_cxx11_abi()": True,
        "torch.utils.cmake_prefix_path": f"{torch}/share/cmake",
        "extension.COMMON_NVCC_FLAGS": [
            "-D__CUDA_NO_HALF_OPERATORS__",
            "--expt-relaxed-constexpr",
        ],
        "extension.CUDA_HOME": str(cuda),
        "extension.ROCM_HOME": None,
        "extension.include_paths(device_type='cuda')": [
            f"{torch}/include",
            f"{torch}/include/torch/csrc/api/include",
            f"{cuda}/include",
        ],
        "extension.library_paths()": [f"{torch}/lib"],
        "extension.library_paths('cuda')": [f"{torch}/lib", f"{cuda}/lib64"],
        "importlib.metadata.version('torch')": "2.15.0",
    }
    assert ask(python, ASK, *expected, env={"CUDA_HOME": str(cuda)}) == expected
    (cuda / "lib").mkdir(parents=True)
    question = "extension.library_paths('cuda')[-1]"
    assert ask(python, ASK, question, env={"CUDA_HOME": str(cuda)}) == {question: f"{cuda}/lib"}
    found = installed_torch(python)
    assert (found.version, found.cuda) == ("2.15.0+cu130", "13.0")


def test_a_newer_target_replaces_an_older_one(python, target):
    older = target / "torch-2.15.0.dist-info"
    (older / "METADATA").write_text("Name: torch\nVersion: 2.16.0\n")
    older.rename(target / "torch-2.16.0.dist-info")
    install_torch_stand_in(site(python), target)
    question = "importlib.metadata.version('torch')"
    assert ask(python, ASK, question) == {question: "2.16.0"}
    assert len(list(site(python).glob("torch*"))) == 2


@pytest.mark.parametrize("text", [None, "Name: torch\n", "Name: torch\nVersion: x\n"])
def test_a_target_without_torch_is_refused(text, target, tmp_path):
    about = target / "torch-2.15.0.dist-info" / "METADATA"
    about.unlink() if text is None else about.write_text(text)
    with pytest.raises(BuildError, match="does not say which torch it has") as caught:
        install_torch_stand_in(tmp_path, target)
    assert caught.value.hint
    assert not (tmp_path / "torch").exists()
