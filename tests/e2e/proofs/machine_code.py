"""Tell whether machine code for one arch does the work that it does for another arch.

It reads what ``nvdisasm -c`` prints, counts the instructions of every kernel, and compares the
build for the device itself (native) with the build for its family. A guard such as
``#if __CUDA_ARCH__ == 1200`` compiles without a warning for 12.1, into a kernel that traps or
returns at once; a generator's gate leaves kernels out. Both are stubs here.

Agreement proves that no guard turned a kernel into a stub. Only the device can prove that the code
loads there, that its results are right, and how fast it is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from patchkit.errors import ProofError

_SECTION = re.compile(r"\s*\.section\s+\.text\.(?P<name>[^\s,]+)")
# Device functions have sections as well; STO_CUDA_ENTRY marks the kernels.
_ENTRY = re.compile(r'\s*\.other\s+(?P<name>[^\s,]+),@"STO_CUDA_ENTRY')
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?P<text>[^;]+)")
_OPCODE = re.compile(r"(?:@!?U?P[0-9T]+\s+)?(?P<name>[A-Z][A-Z0-9_.]*)")
_SMALL_FLOAT = re.compile(
    r"F2FP\b.*\.E[2-5]M[1-3]\b"
)  # packed conversions to or from FP4 to FP8
_TRAP = "BPT.TRAP"
# The guard of vLLM 0.19.1 leaves 11 instructions of kernels that have some 1500.
_NEARLY_EMPTY = 10


@dataclass(frozen=True)
class Kernel:
    """One kernel: its instructions in order, operands included, without the NOPs that pad it."""

    instructions: tuple[str, ...]

    @cached_property
    def opcodes(self) -> Mapping[str, int]:
        """Number of instructions by opcode, modifiers included (``HMMA.16816.F32``)."""
        return Counter(map(_opcode, self.instructions))

    @property
    def tensor(self) -> dict[str, int]:
        """The tensor-core instructions, and the conversions that feed them."""
        # HMMA, IMMA, QMMA (FP8), OMMA (FP4), DMMA, UTCHMMA: nothing else ends so; fused adds end
        # in FMA.
        return {
            name: count
            for name, count in self.opcodes.items()
            if name.partition(".")[0].endswith("MMA") or _SMALL_FLOAT.match(name)
        }


Kernels = Mapping[str, Kernel]


def _opcode(instruction: str) -> str:
    opcode = _OPCODE.match(instruction)
    return opcode["name"] if opcode else instruction


def read_sass(text: str) -> dict[str, Kernel]:
    """Return the kernels of an object by mangled name, from the output of ``nvdisasm -c``.

    Raises ProofError if there is none: an empty listing must not pass for a kernel without faults.
    """
    sections: dict[str, list[str]] = {}
    entries: set[str] = set()
    instructions: list[str] = []
    for line in text.splitlines():
        if section := _SECTION.match(line):
            instructions = sections.setdefault(section["name"], [])
        elif entry := _ENTRY.match(line):
            entries.add(entry["name"])
        elif instruction := _INSTRUCTION.match(line):
            instructions.append(instruction["text"].strip())
    if not entries:
        raise ProofError(
            "the disassembly has no kernel",
            why="nothing was compiled for this arch, or nvdisasm prints another format",
            hint="look at the listing; the format read here is that of nvdisasm -c",
        )
    # NOPs are padding, and two builds need not have equally many.
    return {
        name: Kernel(
            tuple(each for each in sections.get(name, ()) if _opcode(each) != "NOP")
        )
        for name in sorted(entries)
    }


def stubs(native: Kernels, family: Kernels) -> dict[str, str]:
    """Return the kernels that work in the family build and are stubs in the native one, and why."""
    reasons = {name: _loss(native.get(name), kernel) for name, kernel in family.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def _loss(native: Kernel | None, family: Kernel) -> str:
    if native is None:
        return "missing"
    # Kinds, not counts: two archs may unroll differently and do the same work.
    lost = sorted(family.tensor.keys() - native.tensor.keys())
    reasons = [f"without {', '.join(lost)}"] if lost else []
    if _TRAP in native.opcodes and _TRAP not in family.opcodes:
        reasons.append("ends in a trap")
    mine, other = len(native.instructions), len(family.instructions)
    if mine * _NEARLY_EMPTY < other:
        reasons.append(f"{mine} instructions instead of {other}")
    return "; ".join(reasons)


def idle(kernels: Kernels, work: str) -> dict[str, str]:
    """Return the kernels without an opcode that begins with ``work``, and why that is wrong.

    Two builds that are both stubs agree with each other; this says that they do nothing.
    """
    return {
        name: f"no {work}, and no work"
        for name, kernel in kernels.items()
        if not any(opcode.startswith(work) for opcode in kernel.opcodes)
    }


def total(kernels: Kernels) -> dict[str, int]:
    """Count the tensor-core instructions of all kernels together, by opcode."""
    counts: Counter[str] = Counter()
    for kernel in kernels.values():
        counts.update(kernel.tensor)
    return dict(sorted(counts.items()))


def likeness(native: Kernels, family: Kernels) -> str:
    """Say how far two builds without stubs agree; operands are compared as text."""
    if native == family:
        return "the same instructions in the same order"
    pairs = [(native[name], kernel) for name, kernel in family.items()]
    if all(mine.opcodes == other.opcodes for mine, other in pairs):
        return "every opcode equally often"
    if all(mine.tensor == other.tensor for mine, other in pairs):
        return "equal tensor-core instructions, others differ"
    return "same kinds of tensor-core instructions, not equally many"
