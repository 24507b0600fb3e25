"""The C++ standard and the headers that CUDA 13 needs, in the makefiles of before it."""

from functools import reduce

from patchkit.recipes.nccl import kit

_STANDARD = """\
# CUDA 13.0 requires c++17
ifeq ($(shell test "0$(CUDA_MAJOR)" -ge 13; echo $$?),0)
  CXXSTD ?= -std=c++17
else
  CXXSTD ?= -std=c++11
endif

"""
_FLAGS = "CXXFLAGS   := -DCUDA_MAJOR=$(CUDA_MAJOR)"
_HOST = "-Wno-sign-compare {} -Wvla"
_DEVICE = "NVCUFLAGS  := -ccbin $(CXX) $(NVCC_GENCODE) {} --expt-extended-lambda"
_INCLUDES = "              -I $(CUDA_INC) {}\\\n"
# before and after of each place
_SWAPS = (
    (_FLAGS, _STANDARD + _FLAGS),
    (_HOST.format("-std=c++11"), _HOST.format("$(CXXSTD)")),
    (_INCLUDES.format(""), _INCLUDES.format("-I $(CUDA_INC)/cccl ")),
    (_DEVICE.format("-std=c++11"), _DEVICE.format("$(CXXSTD)")),
)


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Look whether the C++ standard follows CUDA's version, or is C++11 in any case."""
    text = tree.read(kit.COMMON_MK)
    if "CXXSTD ?= -std=c++17" in text and _STANDARD not in text:
        return kit.upstream(f"{kit.COMMON_MK}: C++17 from CUDA 13 on")
    edits = [
        edit
        for before, after in _SWAPS
        for edit in kit.swap_text(
            kit.COMMON_MK, text, before, after, note="C++17 for CUDA 13"
        )
    ]
    return kit.found(
        edits,
        now=f"{kit.COMMON_MK}: C++11, and no headers of cccl",
        done=f"{kit.COMMON_MK}: C++17 and the headers of cccl, from CUDA 13 on",
    )


def prove(case: kit.Case) -> str:
    """Ask GNU make which standard it would give nvcc 13, and which an older one."""
    standards = [
        [
            flag
            for flag in kit.make_flags(case.patched, cuda)
            if flag.startswith("-std=")
        ]
        for cuda in (case.request.target.cuda, "12.8")
    ]
    if standards != [["-std=c++17"], ["-std=c++11"]]:
        raise kit.ProofError(f"{kit.COMMON_MK}: nvcc would be given {standards}")
    return "make gives nvcc 13 -std=c++17, and nvcc 12 -std=c++11 as before"


_BEFORE = (
    f"{_FLAGS} -fPIC \\\n"
    f"              -Wall {_HOST.format('-std=c++11')} \\\n"
    f"{_INCLUDES.format('')}"
    "              $(CXXFLAGS)\n"
    f"{_DEVICE.format('-std=c++11')}\n"
)
_AFTER = reduce(lambda text, swap: text.replace(*swap), _SWAPS, _BEFORE)

FIX = kit.Fix(
    title="C++17 and the cccl headers with CUDA 13",
    symptom="2.26 with CUDA 13: errors out of CUDA's own headers, which are C++17 now.",
    why="The makefiles of 2.26 say -std=c++11 in any case, where those of 2.27.5 say that CUDA 13 "
    "requires C++17; and CUDA 13 keeps libcu++ in include/cccl, "
    "where the host compiler does not look.",
    needs=(kit.required(">=2.26,<2.27", "CUDA 13 needs C++17"),),
    upstream="2.27 chooses C++17 for CUDA 13, and looks in cccl",
    look=look,
    prove=prove,
    prove_from_stock=True,
    layer="build",
    majors=(9, 11, 12),
    examples=(
        kit.Example(
            "2.26.2",
            kit.COMMON_MK,
            _BEFORE,
            _AFTER,
        ),
    ),
)
