"""Where the sources of other projects come from, what is recorded of them, and upstream's parts."""

import platform
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from patchkit.errors import ProofError, SourceError, UsageError
from patchkit.patching.fix import Request
from patchkit.recipes.vllm.build import Wanted, by_option, known_externals
from patchkit.recipes.vllm.external import External
from patchkit.records import RECIPES
from patchkit.source.releases import read_lock
from patchkit.source.resolve import SourceOrigin
from patchkit.target import targets
from patchkit.wheel.build.machine import WORK, Toolchain
from patchkit.wheel.file.wheelfile import WheelFile
from patchkit.wheel.vllm.inputs import (
    VllmOrder,
    gather_sources,
    parse_given,
    prove_parts,
    write_parts,
)
from support import read_files, write_files
from support.vllm_wheels import HOPPER, LOST
from support.wheels import OTHER_CPU, write_zip

VERSION = Version("0.25.1")
MACHINE = platform.machine()
HOME = WORK / f"vllm-0.25.1-gb10-{MACHINE}" / "external"
KNOWN = {each.option: each for each in known_externals()}


def wanted(option, variable, url="file:///nowhere", commit="1" * 40):
    more = {"submodules": None, "path": "x.cmake", "line": 1}
    external = External(name=option, variable=variable, url=url, pin=commit, **more)
    return Wanted(external, KNOWN[option], commit)


QUTLASS = wanted("qutlass", "QUTLASS_SRC_DIR")


@pytest.fixture
def repository(tmp_path, git):
    """A committed repository: ``repository("name", files)`` gives its folder and the commit."""

    def make(name, files, links=()):
        root = write_files(tmp_path / name, files)
        git(root, "init", "--quiet")
        git(root, "add", "--all")
        for path, commit in links:
            git(root, "update-index", "--add", "--cacheinfo", f"160000,{commit},{path}")
        git(root, "commit", "--quiet", "--message", "one")
        return root, git(root, "rev-parse", "HEAD").strip()

    return make


@pytest.fixture
def take(tmp_path, monkeypatch):
    """Gather into one folder: ``take(wanted, "qutlass=FOLDER", offline=True)``."""
    monkeypatch.setenv("PATCHKIT_CACHE_DIR", str(tmp_path / "cache"))

    def gathered(*wanted, given=(), cpu=MACHINE, **how):
        order = VllmOrder(
            origin=SourceOrigin(path=tmp_path, identity="", version=VERSION),
            fresh=False,
            torch="",
            request=Request(target=targets()["gb10"]),
            toolchain=replace(TOOLS, machine=cpu),
            jobs=1,
            given=parse_given(given),
            **how,
        )
        return gather_sources(wanted, order, tmp_path / "sources")

    return gathered


def test_a_commit_comes_once_with_the_submodules_that_it_names(
    take, repository, tmp_path
):
    cutlass, inner = repository(
        "mirror/cutlass", {"include/cutlass/cutlass.h": "// 4\n"}
    )
    gitmodules = f'[submodule "x"]\n\tpath = csrc/cutlass\n\turl = {cutlass}\n'
    files = {"flash_mla/flash_mla_interface.py": "\n", ".gitmodules": gitmodules}
    root, commit = repository("mirror/flashmla", files, [("csrc/cutlass", inner)])
    flashmla = wanted("flashmla", "FLASH_MLA_SRC_DIR", str(root), commit)
    with pytest.raises(SourceError, match="offline it cannot be fetched") as caught:
        take(flashmla, offline=True)
    cost = "or leave it out: --without flashmla; MLA models fall to other backends"
    assert cost in caught.value.hint
    got = take(flashmla)
    folder = tmp_path / "sources" / "flashmla"
    assert got.environment == {"FLASH_MLA_SRC_DIR": str(HOME / "flashmla")}
    assert got.defines == {}
    assert (folder / "csrc/cutlass/include/cutlass/cutlass.h").read_text() == "// 4\n"
    assert got.identities == {"flashmla": f"{flashmla.external.url}@{flashmla.commit}"}
    shutil.rmtree(tmp_path / "sources")
    assert take(flashmla, offline=True) == got


def test_a_folder_is_recorded_by_its_digest(take, tmp_path):
    facts = []
    for text in ("// one\n", "// two\n"):
        place = write_files(
            tmp_path / "top", {"qutlass/csrc/bindings.cpp": text, ".git/config": "x"}
        )
        got = take(QUTLASS, given=[f"qutlass={place}"])
        folder = tmp_path / "sources/qutlass"
        assert (folder / "qutlass/csrc/bindings.cpp").read_text() == text
        assert got.identities["qutlass"].endswith(" (not compared with the pin)")
        facts.append(got.identities["qutlass"])
        shutil.rmtree(folder)
    assert facts[0] != facts[1]


def test_cmake_is_given_the_folder_that_it_takes(take, tmp_path):
    triton, flash = KNOWN["triton-kernels"], KNOWN["flash-attn"]
    whole = write_files(tmp_path / "triton", dict.fromkeys(triton.files, ""))
    write_files(tmp_path / "fa", dict.fromkeys(flash.files, ""))
    triton_kernels = wanted("triton-kernels", "TRITON_KERNELS_SRC_DIR")
    given = [f"triton-kernels={whole}", f"flash-attn={tmp_path / 'fa'}"]
    got = take(
        triton_kernels, wanted("flash-attn", "VLLM_FLASH_ATTN_SRC_DIR"), given=given
    )
    inner = tmp_path / "sources/triton-kernels/python/triton_kernels/triton_kernels"
    place = HOME / inner.relative_to(tmp_path / "sources")
    assert got.environment == {"TRITON_KERNELS_SRC_DIR": str(place)}
    defined = {"FETCHCONTENT_SOURCE_DIR_VLLM-FLASH-ATTN": str(HOME / "flash-attn")}
    assert got.defines == defined
    # The folder that CMake takes may itself be named.
    direct = whole / "python/triton_kernels/triton_kernels"
    shutil.rmtree(tmp_path / "sources")
    take(triton_kernels, given=[f"triton-kernels={direct}"])
    assert (inner / "__init__.py").is_file()


def test_what_cannot_be_compiled_for_another_cpu_is_refused(take, tmp_path):
    """DeepGEMM's _C; a build for the CPU at hand takes the same folder."""
    deepgemm = replace(QUTLASS, known=KNOWN["deepgemm"])
    given = [
        f"deepgemm={write_files(tmp_path / 'd', dict.fromkeys(deepgemm.known.files, ''))}"
    ]
    with pytest.raises(
        UsageError, match=f"deepgemm cannot be compiled for {OTHER_CPU}"
    ) as caught:
        take(deepgemm, given=given, cpu=OTHER_CPU)
    assert "--source deepgemm=vllm==0.25.1; or --without deepgemm" in caught.value.hint
    assert list(take(deepgemm, given=given).identities) == ["deepgemm"]


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ("cutlass", UsageError, "not OPTION=WHAT"),
        ("cutlas=x", UsageError, "no source or extension is called 'cutlas'"),
        ("flashmla=/tmp", UsageError, "this build takes no flashmla"),
        ("qutlass=/nowhere", UsageError, "there is no such folder"),
        (
            "qutlass=git+https://example.org/q@main",
            UsageError,
            "'main' is not a commit",
        ),
        ("qutlass=vllm==0.25.0", UsageError, "this build is of vLLM 0.25.1"),
        ("qutlass={empty}", SourceError, "qutlass/csrc/bindings.cpp is missing in it"),
    ],
)
def test_what_cannot_be_used_is_refused(take, tmp_path, given, error, says):
    (tmp_path / "empty").mkdir()
    with pytest.raises(error, match=says):
        take(QUTLASS, given=[given.format(empty=tmp_path / "empty")])
    if error is UsageError:
        assert not (tmp_path / "sources").exists()


GB10 = targets()["gb10"]
RELEASE = f"sha256:{read_lock(RECIPES / 'vllm' / 'lock.toml')['0.28.0'].sha256}"
PLACES = dict.fromkeys(("nvcc", "cxx", "include", "lib"), Path())
TOOLS = Toolchain(machine="aarch64", cuda="", compiler="", **PLACES)
ORDER = {
    "identity": RELEASE,
    "fresh": False,
    "torch": "",
    "toolchain": TOOLS,
    "jobs": 1,
}
FOLDER = {"given": {"flash-attn": "FOLDER"}}


@pytest.mark.parametrize(
    ("version", "how", "asked", "source"),
    [
        ("0.28.0", {}, {}, "vllm==0.28.0"),
        # No release; a release whose wheel is linked with CUDA 12; what the user asks for.
        ("0.28.0", {"identity": "folder:sha256:1"}, {}, ""),
        ("0.28.1.dev3", {}, {}, ""),
        ("0.19.1", {}, {}, ""),
        ("0.28.0", FOLDER, {}, "FOLDER"),
        ("0.28.0", {}, {"also": "fa2_sass"}, ""),
        ("0.28.0", {}, {"only": "fa2_sass"}, ""),
    ],
)
def test_flash_attention_is_upstreams_or_compiled(version, how, asked, source):
    request = Request(
        target=GB10, **{name: frozenset({fix}) for name, fix in asked.items()}
    )
    options = ORDER | how
    origin = SourceOrigin(
        path=Path(), identity=options.pop("identity"), version=Version(version)
    )
    ordered = VllmOrder(**options, origin=origin, request=request)
    assert ordered.source_of(KNOWN["flash-attn"]) == source
    assert ordered.source_of(KNOWN["qutlass"]) == ""


FA = "vllm/vllm_flash_attn"
MEMBERS = {
    f"{FA}/__init__.py": b"# vLLM's own\n",
    f"{FA}/_vllm_fa2_C.abi3.so": LOST,  # with PTX, and linked with CUDA 13
    f"{FA}/_vllm_fa3_C.abi3.so": HOPPER,
    f"{FA}/cute/interface.py": b"import vllm.vllm_flash_attn.cute.utils\n",
    f"{FA}/layers/rotary.py": b"rotary = 1\n",
    "vllm/_flashmla_C.abi3.so": HOPPER,
    "vllm/_qutlass_C.abi3.so": HOPPER,
    "vllm/third_party/triton_kernels/a/b.py": b"b = 1\n",
}


@pytest.fixture
def wheel(tmp_path):
    """Make a wheel of these members: ``with wheel() as opened``."""

    def make(members=MEMBERS, name="vllm-0.25.1-cp38-abi3-manylinux_2_28_aarch64.whl"):
        return WheelFile(write_zip(tmp_path / name, members))

    return make


@pytest.fixture
def written(tmp_path):
    """Write a project's parts of a wheel into one folder: ``written(opened, "flash-attn")``."""

    def write(opened, option):
        return write_parts(opened, by_option([option])[0], GB10, tmp_path / "parts")

    return write


def test_what_is_of_the_project_and_of_use_on_the_device(wheel, written, tmp_path):
    with wheel() as opened:
        parts = written(opened, "flash-attn")
        python = written(opened, "triton-kernels")
        digest = opened.sha256
    kept = ("_vllm_fa2_C.abi3.so", "cute/interface.py", "layers/rotary.py")
    expected = [
        *(f"{FA}/{name}" for name in kept),
        "vllm/third_party/triton_kernels/a/b.py",
    ]
    assert read_files(tmp_path / "parts") == {name: MEMBERS[name] for name in expected}
    whole = f"vllm==0.25.1, sha256:{digest}"
    assert parts == f"{whole}; as upstream compiled it"
    assert python == f"{whole}; as upstream has it installed"


@pytest.mark.parametrize(
    ("option", "error", "says", "hint"),
    [
        (
            "tml-fa4",
            UsageError,
            "holds nothing of tml-fa4",
            "name a folder or git+URL@COMMIT",
        ),
        (
            "flashmla",
            UsageError,
            "for other devices than NVIDIA DGX Spark",
            "--without flashmla",
        ),
        (
            "qutlass",
            ProofError,
            "no code that NVIDIA DGX Spark",
            "--source qutlass=FOLDER",
        ),
    ],
)
def test_what_does_not_serve_the_device_is_refused(
    wheel, written, option, error, says, hint
):
    with wheel() as opened, pytest.raises(error, match=says) as caught:
        written(opened, option)
    assert hint in caught.value.hint


def test_the_wheel_is_proved_to_have_them(wheel, written, tmp_path):
    with wheel() as opened:
        written(opened, "flash-attn")
        said = prove_parts(opened, tmp_path / "parts", "flash-attn")
    assert said == "flash-attn: 3 files are those of upstream's wheel"
    other = {**MEMBERS, f"{FA}/cute/interface.py": b"other\n"}
    less = {name: data for name, data in MEMBERS.items() if "rotary" not in name}
    for members, lost in ((other, "cute/interface.py"), (less, "layers/rotary.py")):
        opened = wheel(members, "vllm-1-py3-none-linux_aarch64.whl")
        with (
            opened,
            pytest.raises(
                ProofError, match=f"{lost} of flash-attn is not in the wheel"
            ),
        ):
            prove_parts(opened, tmp_path / "parts", "flash-attn")
