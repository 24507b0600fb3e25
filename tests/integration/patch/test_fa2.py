"""Ask what FlashAttention 2 is compiled to: a release's own CMake files, really configured."""

import re

import pytest

from patchkit.patching.plan import make_plan
from patchkit.patching.workspace import open_workspace
from patchkit.process import run
from patchkit.proof.cmake import cmake_program
from support import write_files
from support.needed import need
from support.selection import RELEASES, WHOLE

# What flash-attention's CMakeLists.txt does with the macros, of which it has a copy.
FLASH_ATTENTION = """\
include(utils.cmake)
file(GLOB FA2_GEN_SRCS "csrc/*.cu")
set_gencode_flags_for_srcs(SRCS "${FA2_GEN_SRCS}" CUDA_ARCHS "8.0+PTX")
add_library(_vllm_fa2_C INTERFACE csrc/api.cpp ${FA2_GEN_SRCS})
"""
VLLM = """\
cmake_minimum_required(VERSION 3.26)
project(vllm NONE)
include(FetchContent)
include(vllm_flash_attn.cmake)
get_target_property(SOURCES _vllm_fa2_C SOURCES)
foreach(SOURCE ${SOURCES})
  get_property(OPTIONS SOURCE ${SOURCE} TARGET_DIRECTORY _vllm_fa2_C PROPERTY COMPILE_OPTIONS)
  message(STATUS "${SOURCE} has ${OPTIONS}")
endforeach()
"""
PTX = "$<$<COMPILE_LANGUAGE:CUDA>:-gencode;arch=compute_80,code=compute_80>"


def flag(arch):
    return f"$<$<COMPILE_LANGUAGE:CUDA>:-gencode;arch=compute_{arch},code=sm_{arch}>"


@pytest.mark.releases
@pytest.mark.parametrize("version", RELEASES if WHOLE else (RELEASES[0], RELEASES[-1]))
def test_what_fa2_is_compiled_to(version, release, recipe, ask, tmp_path):
    need("make")
    flash = tmp_path / "flash-attention"
    workspace = open_workspace(release(version), "vllm")
    sources = dict.fromkeys(("csrc/a.cu", "csrc/b.cu", "csrc/api.cpp"), "")
    utils = workspace.tree.read("cmake/utils.cmake")
    write_files(tmp_path, {"CMakeLists.txt": VLLM})
    write_files(
        flash, {"CMakeLists.txt": FLASH_ATTENTION, "utils.cmake": utils, **sources}
    )

    def options(archs, *also):
        plan = make_plan(workspace.tree, recipe, ask(also=also))
        cmake = plan.patched.read("cmake/external_projects/vllm_flash_attn.cmake")
        (tmp_path / "vllm_flash_attn.cmake").write_text(cmake)
        done = run(
            *(
                cmake_program(),
                "-G",
                "Unix Makefiles",
                "-S",
                tmp_path,
                "-B",
                tmp_path / "build",
            ),
            *(
                f"-DFETCHCONTENT_SOURCE_DIR_VLLM-FLASH-ATTN={flash}",
                f"-DCUDA_ARCHS={archs}",
            ),
        )
        return dict(re.findall(r"-- (?:\S*/)?(\w+\.\w+) has (.*)", done.output))

    # PTX, unless a device of 8.x is built for, or machine code of its own is asked for.
    assert options("12.1a") == {"api.cpp": "", "a.cu": PTX, "b.cu": PTX}
    both = f"{flag(80)};{PTX}"
    assert options("8.6;12.1a") == {"api.cpp": "", "a.cu": both, "b.cu": both}
    own = flag("121a")
    assert options("12.1a", "fa2_sass") == {"api.cpp": "", "a.cu": own, "b.cu": own}
    both = f"{flag(86)};{own}"
    assert options("8.6;12.1a", "fa2_sass") == {
        "api.cpp": "",
        "a.cu": both,
        "b.cu": both,
    }
