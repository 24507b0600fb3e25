"""What a plain make builds for: the device, where upstream builds for six others."""

from __future__ import annotations

import re

from patchkit.edit.text import drift, occurrences, swap_text
from patchkit.errors import DriftError, ProofError
from patchkit.patching.fix import Evidence, Example, Finding, Fix, Need, Request, Severity, found
from patchkit.proof.nccl import COMMON_MK, gencodes, make_flags
from patchkit.source.tree import SourceTree

_ANCHOR = """\
# You should define NVCC_GENCODE in your environment to the minimal set
# of archs to reduce compile time.
"""
_MARK = "# Set by default for one device alone; NVCC_GENCODE of the user's still decides.\n"
_BLOCK = """\
ifeq ($(shell test "0$(CUDA_MAJOR)" -ge 13; echo $$?),0)
  NVCC_GENCODE ?= {gencode}
endif
"""
_ASSIGNED = re.compile(r"^[ \t]*NVCC_GENCODE[ \t]*(?P<operator>[:+?]?=)", re.MULTILINE)
_USERS = "-gencode=arch=compute_90,code=sm_90"


def _gencode(request: Request) -> str:
    arch = request.target.plain(request.arch)
    return f"-gencode=arch=compute_{arch},code=sm_{arch}"


def look(tree: SourceTree, request: Request) -> Finding:
    """Whether NVCC_GENCODE has the device as its default, before upstream's own choice."""
    text = tree.read(COMMON_MK)
    operators = {match["operator"] for match in _ASSIGNED.finditer(text)}
    if operators != {"?="}:
        raise DriftError(
            f"{COMMON_MK}: NVCC_GENCODE is set with {' and '.join(sorted(operators)) or 'nothing'}",
            why="a default would have no effect, or the user's choice would have none",
            hint="restore the file from the release, or leave this fix out with --skip",
        )
    after = _ANCHOR + _MARK + _BLOCK.format(gencode=_gencode(request))
    if _MARK in text and after not in text:
        raise drift(COMMON_MK, text, _MARK, occurrences(text, _MARK))
    edits = swap_text(COMMON_MK, text, _ANCHOR, after, note=_gencode(request))
    return found(
        edits,
        now=f"{COMMON_MK}: a plain make builds upstream's list of archs",
        done=f"{COMMON_MK}: a plain make builds {_gencode(request)}",
    )


def prove(stock: SourceTree, patched: SourceTree, request: Request, active: frozenset[str]) -> str:
    """GNU make, asked what it would give nvcc: alone, and with the user's NVCC_GENCODE."""
    cuda, wanted = request.target.cuda, _gencode(request)
    before, after = (gencodes(make_flags(tree, cuda)) for tree in (stock, patched))
    if after != (wanted,):
        raise ProofError(
            f"make would give nvcc {' '.join(after) or 'no -gencode'}, not {wanted} alone",
            hint="restore the file from the release",
        )
    by_environment = make_flags(patched, cuda, environment={"NVCC_GENCODE": _USERS})
    by_argument = make_flags(patched, cuda, arguments=[f"NVCC_GENCODE={_USERS}"])
    if {gencodes(by_environment), gencodes(by_argument)} != {(_USERS,)}:
        raise ProofError("the user's NVCC_GENCODE would not decide any more")
    return f"make gives nvcc {wanted}, where it gave {len(before)} others"


FIX = Fix(
    id="make_archs",
    title="A plain make builds NCCL for the device alone",
    symptom="A plain make compiles for six GPUs that are not there, and not for the one that is. "
    "With 2.26, nvcc 13 stops: Unsupported gpu architecture 'compute_50'.",
    why="The default of NVCC_GENCODE is a list for every GPU that CUDA supports, sm_121 not among "
    "them; that of 2.26 has archs that CUDA 13 dropped. Where the variable is set it decides.",
    needs=(
        Need(">=2.26,<2.27", Severity.REQUIRED, "nvcc 13 knows no compute_50 to compute_70"),
        Need(">=2.27", Severity.RECOMMENDED, "no code for the very device, but for six others"),
    ),
    upstream="2.27 has a list for CUDA 13; none names sm_121, whose code is that of sm_120",
    evidence=(
        Evidence("what make would give nvcc, before and after", "patchkit's proof", "measured"),
        Evidence(
            "2.28.9 for sm_121 alone, stripped: 32.6 MB, where the stock wheel has 189.8 MB; the "
            "same machine code as stock's sm_120",
            "built with nvcc 13.0.88 and compared section by section",
            "measured",
        ),
        Evidence("sm_120 code runs on 12.1", "NVIDIA's Blackwell Compatibility Guide", "read"),
    ),
    look=look,
    prove=prove,
    prove_from_stock=True,
    layer="build",
    majors=(9, 11, 12),
    examples=(
        Example(
            version="2.30.7",
            path=COMMON_MK,
            before=f"{_ANCHOR}NVCC_GENCODE ?= $(CUDA12_8_GENCODE)\n",
            after=f"{_ANCHOR}{_MARK}"
            + _BLOCK.format(gencode="-gencode=arch=compute_121,code=sm_121")
            + "NVCC_GENCODE ?= $(CUDA12_8_GENCODE)\n",
        ),
        Example(
            version="2.26.2",
            path=COMMON_MK,
            arch="family",
            before=f"{_ANCHOR}NVCC_GENCODE ?= $(CUDA8_GENCODE)\n",
            after=f"{_ANCHOR}{_MARK}"
            + _BLOCK.format(gencode="-gencode=arch=compute_120,code=sm_120")
            + "NVCC_GENCODE ?= $(CUDA8_GENCODE)\n",
        ),
    ),
)
