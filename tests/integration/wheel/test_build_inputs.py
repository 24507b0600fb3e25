"""What real releases fetch, need and ask of torch, and what is left without optional extensions."""

import ast
import tomllib
import venv
from collections import Counter
from dataclasses import asdict

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from patchkit.errors import DriftError, SourceError
from patchkit.patching.fix import Request
from patchkit.recipes.vllm.archs import evaluate
from patchkit.recipes.vllm.build import (
    by_option,
    locked_requirements,
    read_needs,
    recorded_needs,
    wanted,
)
from patchkit.recipes.vllm.external import externals
from patchkit.recipes.vllm.leave_out import idle_sources, leave_out, take_installed
from patchkit.source.detect import detect
from patchkit.target import targets
from patchkit.wheel.build.requirements import read_requirements
from patchkit.wheel.build.torch_toolkit import install_torch_stand_in
from support.small_torch import site, small_torch
from support.torch_questions import answers, questions
from tools.stated_needs import stated_needs

pytestmark = pytest.mark.releases

H200 = targets()["h200"]
# Read off the releases by hand: how many sources each fetches, from that release on.
COUNTS = {
    "0.11.1": 4,  # cutlass, flash-attn, flashmla, qutlass
    "0.12.0": 5,  # triton_kernels
    "0.20.0": 6,  # deepgemm
    "0.24.0": 7,  # fmha_sm100
    "0.26.0": 8,  # tml_fa4
    "0.27.0": 9,  # flashkda
    "0.30.0": 10,  # deepselect
}


@pytest.fixture
def source(release, version):
    return detect(release(version), "vllm")


def optional(tree):
    """What a release fetches that can be taken from elsewhere."""
    every = [each.known for each in wanted(externals(tree), tree.version, release=True)]
    return [known for known in every if known.optional]


def archs_by_order(tree):
    """Lines may move; the order of the calls in a file does not."""
    counts = Counter()
    archs = {}
    for group in evaluate(tree, H200, "9.0a", "13.0"):
        path, _line = group.site
        if group.archs:
            archs[path, counts[path]] = group.archs
        counts[path] += 1
    return archs


def assert_other_kernels_have_their_archs(source, tree, changed):
    """Judged by the release's own CMake."""
    before, after = archs_by_order(source), archs_by_order(tree)
    files = {each.file for each in changed}
    assert after == {
        place: archs for place, archs in before.items() if place[0] not in files
    }


def test_every_source_is_known_with_its_commit(source):
    found = wanted(externals(source), source.version, release=True)
    expected = next(
        n for since, n in reversed(COUNTS.items()) if Version(since) <= source.version
    )
    assert len(found) == expected
    assert all(len(each.commit) == 40 for each in found)
    if source.version >= Version("0.20"):
        # What a default build for a GB10 needs git for.
        idle = idle_sources(source, Request(target=targets()["gb10"]), ())
        named = {
            each.known.option
            for each in found
            if not each.known.is_ready(source.version)
        }
        assert named - idle.keys() <= {"cutlass", "qutlass"}


def test_the_files_say_what_the_recipe_says(source):
    recorded = asdict(recorded_needs(source.version))
    assert recorded == recorded | stated_needs(source)
    assert read_needs(source) == recorded_needs(source.version)


@pytest.mark.e2e
def test_without_what_is_optional_nothing_asks_for_it(source, ask):
    version = source.version
    left = [
        k
        for k in optional(source)
        if not any(each.covers(version) for each in k.refused)
    ]
    tree = leave_out(source, left)
    names = {each.name for each in externals(tree)}
    assert names == {each.name for each in externals(source)} - {
        each.name for each in left
    }
    gone = {target for each in left for target in each.targets}
    assert (
        set(_targets(tree.read("setup.py")))
        == set(_targets(source.read("setup.py"))) - gone
    )
    for path, text in tree.overlay.items():
        if path.endswith(".py"):
            compile(text, path, "exec")
    assert leave_out(tree, left).overlay == tree.overlay
    assert_other_kernels_have_their_archs(source, tree, left)


def test_the_files_of_a_folder_take_the_place_of_a_source(source, ask):
    """setup.py stays as it is, CMake has its targets, and the other kernels their archs."""
    fetched = wanted(externals(source), source.version, release=True)
    taken = [each for each in fetched if each.known.optional]
    tree = take_installed(source, taken)
    assert {each.name for each in externals(tree)} == {"cutlass"}
    assert set(tree.overlay) == {"CMakeLists.txt"}
    assert take_installed(tree, taken).overlay == tree.overlay
    assert_other_kernels_have_their_archs(source, tree, optional(source))


@pytest.mark.e2e
@pytest.mark.parametrize("version", ["0.21.0", "0.33.0"], scope="module")
def test_what_is_left_out_has_no_code_for_the_device(source, ask):
    """Judged by the release's own CMake, for a GB10 and for a Thor."""
    for target in (targets()["gb10"], targets()["thor"]):
        idle = idle_sources(source, Request(target=target), ())
        files = {
            known.file
            for known in by_option(idle)
            if idle[known.option].startswith("of no use")
        }
        groups = evaluate(source, target, target.native, "13.0")
        assert "cmake/external_projects/flashmla.cmake" in files
        assert [
            each.site for each in groups if each.site[0] in files and each.archs
        ] == []


def test_locked_requirements_are_what_the_release_asks_for(source):
    torch = read_needs(source).torch
    if source.version < Version("0.20"):
        with pytest.raises(
            SourceError, match=f"torch {torch} for CUDA 13 is not on the package"
        ):
            locked_requirements(torch)
        return
    locked = {each.name: each for each in read_requirements(locked_requirements(torch))}
    project = tomllib.loads(source.read("pyproject.toml"))
    for each in map(Requirement, project["build-system"]["requires"]):
        assert each.specifier.contains(locked[canonicalize_name(each.name)].version), (
            each
        )
    assert all(each.hashes for each in locked.values())


@pytest.mark.parametrize("version", ["0.25.1"], scope="module")
@pytest.mark.parametrize(
    ("path", "before", "after", "says"),
    [
        ("CMakeLists.txt", "flashmla.cmake)", "flashmla.cmake )", "found 0 times"),
        (
            "cmake/external_projects/flashmla.cmake",
            "_flashmla_extension_C",
            "_more_C",
            "_more_C",
        ),
        (
            "setup.py",
            '"vllm._flashmla_C"',
            '"vllm._flashmla_C" + ""',
            "asks for _flashmla_C",
        ),
    ],
)
def test_an_edited_file_is_drift(source, path, before, after, says):
    tree = source.with_texts({path: source.read(path).replace(before, after)})
    with pytest.raises(DriftError, match=says):
        leave_out(tree, by_option(["flashmla"]))


def _targets(text):
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") == "CMakeExtension"
        ):
            yield node.keywords[0].value.value.rpartition(".")[2]


EXTENSION = "torch.utils.cpp_extension"
# What every release asks, and what must not be a default value.
EVERY = {
    "torch.version.cuda": "13.0",
    "torch.version.hip": None,
    f"{EXTENSION}.CUDA_HOME": "/cuda",
    f"{EXTENSION}.ROCM_HOME": None,
    f"{EXTENSION}.COMMON_NVCC_FLAGS": [
        "-D__CUDA_NO_HALF_OPERATORS__",
        "--expt-relaxed-constexpr",
    ],
}


def test_every_question_of_a_release_is_answered(release, version, tmp_path):
    """By an interpreter with the stand-in for torch."""
    target, python = (
        small_torch(tmp_path / "target"),
        tmp_path / "python" / "bin" / "python",
    )
    venv.create(tmp_path / "python", with_pip=False)
    install_torch_stand_in(site(python), target)
    answered = answers(python, questions(release(version)), {"CUDA_HOME": "/cuda"})
    assert [each for each, answer in answered.items() if "refused" in answer] == []
    found = {each: answer.get("value") for each, answer in answered.items()}
    cmake = {"torch.utils.cmake_prefix_path": f"{target}/torch/share/cmake"}
    assert found == found | EVERY | cmake
