"""Ask the stand-in for torch all that the build of each release asks of torch."""

from __future__ import annotations

import venv

import pytest

from e2e.proofs.torch_questions import answers, questions
from patchkit.wheel.build.cross_torch import install_torch_stand_in
from support.small_torch import site, small_torch

pytestmark = pytest.mark.releases

EXTENSION = "torch.utils.cpp_extension"
# What every release asks, and what must not be a default value.
EVERY = {
    "torch.version.cuda": "13.0",
    "torch.version.hip": None,
    f"{EXTENSION}.CUDA_HOME": "/cuda",
    f"{EXTENSION}.ROCM_HOME": None,
    "torch.utils.cpp_extension.COMMON_NVCC_FLAGS": [
        "-D__CUDA_NO_HALF_OPERATORS__",
        "--expt-relaxed-constexpr",
    ],
}


@pytest.fixture(scope="module")
def torch(tmp_path_factory):
    """An interpreter with the stand-in, and the site-packages folder that it reads."""
    home = tmp_path_factory.mktemp("across")
    target = small_torch(home / "target")
    venv.create(home / "python", with_pip=False)
    python = home / "python" / "bin" / "python"
    install_torch_stand_in(site(python), target)
    return python, target


def test_every_question_of_a_release_is_answered(release, version, torch):
    python, target = torch
    answered = answers(python, questions(release(version)), {"CUDA_HOME": "/cuda"})
    assert [each for each, answer in answered.items() if "refused" in answer] == []
    found = {each: answer.get("value") for each, answer in answered.items()}
    cmake = {"torch.utils.cmake_prefix_path": f"{target}/torch/share/cmake"}
    assert found == found | EVERY | cmake
