"""What a plain make builds for: the device, where upstream builds for six others."""

import re

from patchkit.recipes.nccl import kit

_ANCHOR = """\
# You should define NVCC_GENCODE in your environment to the minimal set
# of archs to reduce compile time.
"""
_MARK = (
    "# Set by default for one device alone; NVCC_GENCODE of the user's still decides.\n"
)
_BLOCK = """\
ifeq ($(shell test "0$(CUDA_MAJOR)" -ge 13; echo $$?),0)
  NVCC_GENCODE ?= {gencode}
endif
"""
_ASSIGNED = re.compile(r"^[ \t]*NVCC_GENCODE[ \t]*(?P<operator>[:+?]?=)", re.MULTILINE)
_USERS = "-gencode=arch=compute_90,code=sm_90"


def _gencode(request: kit.Request) -> str:
    arch = request.target.plain_arch(request.arch)
    return f"-gencode=arch=compute_{arch},code=sm_{arch}"


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Look whether NVCC_GENCODE has the device as its default, before upstream's own choice."""
    text = tree.read(kit.COMMON_MK)
    operators = {match["operator"] for match in _ASSIGNED.finditer(text)}
    if operators != {"?="}:
        said = " and ".join(sorted(operators)) or "nothing"
        raise kit.DriftError(
            f"{kit.COMMON_MK}: NVCC_GENCODE is set with {said}",
            why="a default would have no effect, or the user's choice would have none",
            hint="restore the file from the release, or leave this fix out with --without",
        )
    after = _ANCHOR + _MARK + _BLOCK.format(gencode=_gencode(request))
    if _MARK in text and after not in text:
        raise kit.altered(f"{kit.COMMON_MK}: what patchkit wrote names another arch")
    edits = kit.swap_text(kit.COMMON_MK, text, _ANCHOR, after, note=_gencode(request))
    return kit.found(
        edits,
        now=f"{kit.COMMON_MK}: a plain make builds upstream's list of archs",
        done=f"{kit.COMMON_MK}: a plain make builds {_gencode(request)}",
    )


def prove(case: kit.Case) -> str:
    """Ask GNU make what it would give nvcc: alone, and with the user's NVCC_GENCODE."""
    cuda = case.request.target.cuda
    wanted = _gencode(case.request)
    before = kit.gencodes(kit.make_flags(case.stock, cuda))
    after = kit.gencodes(kit.make_flags(case.patched, cuda))
    if after != (wanted,):
        raise kit.ProofError(
            f"make would give nvcc {' '.join(after) or 'no -gencode'}, not {wanted} alone",
            hint="restore the file from the release",
        )

    by_environment = kit.make_flags(
        case.patched, cuda, environment={"NVCC_GENCODE": _USERS}
    )
    by_argument = kit.make_flags(
        case.patched, cuda, arguments=[f"NVCC_GENCODE={_USERS}"]
    )
    if {kit.gencodes(by_environment), kit.gencodes(by_argument)} != {(_USERS,)}:
        raise kit.ProofError("the user's NVCC_GENCODE would not decide any more")
    return f"make gives nvcc {wanted}, where it gave {len(before)} others"


FIX = kit.Fix(
    title="A plain make builds NCCL for the device alone",
    symptom="A plain make compiles for six GPUs that are not there, and not for the one that is. "
    "With 2.26, nvcc 13 stops: Unsupported gpu architecture 'compute_50'.",
    why="The default of NVCC_GENCODE is a list for every GPU that CUDA supports, sm_121 not among "
    "them; that of 2.26 has archs that CUDA 13 dropped. Where the variable is set it decides.",
    needs=(
        kit.required(">=2.26,<2.27", "nvcc 13 knows no compute_50 to compute_70"),
        kit.recommended(">=2.27", "no code for the very device, but for six others"),
    ),
    upstream="2.27 has a list for CUDA 13; none names sm_121, whose code is that of sm_120",
    look=look,
    prove=prove,
    prove_from_stock=True,
    layer="build",
    majors=(9, 11, 12),
    examples=(
        kit.Example(
            "2.30.7",
            kit.COMMON_MK,
            f"{_ANCHOR}NVCC_GENCODE ?= $(CUDA12_8_GENCODE)\n",
            f"{_ANCHOR}{_MARK}"
            + _BLOCK.format(gencode="-gencode=arch=compute_121,code=sm_121")
            + "NVCC_GENCODE ?= $(CUDA12_8_GENCODE)\n",
        ),
    ),
)
