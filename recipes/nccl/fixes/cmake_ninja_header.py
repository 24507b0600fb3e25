"""A header that one command makes twice, which Ninja does not take."""

from __future__ import annotations

from patchkit.edit.cmake import Argument, Command, commands
from patchkit.edit.splice import Edit
from patchkit.errors import ProofError
from patchkit.patching.fix import (
    Evidence,
    Example,
    Finding,
    Fix,
    Need,
    Request,
    Severity,
    found,
    upstream,
)
from patchkit.proof.nccl import SOURCE_FILE, configured
from patchkit.source.tree import SourceTree

_OUTPUT, _BYPRODUCTS = "OUTPUT", "BYPRODUCTS"
_KEYWORDS = frozenset({_OUTPUT, _BYPRODUCTS, "COMMAND", "DEPENDS", "COMMENT", "VERBATIM"})
_MARK = "\n    # nccl.h is the OUTPUT, and once is enough: Ninja stops at a second time."


def look(tree: SourceTree, request: Request) -> Finding:
    """Whether a custom command names one file both as its output and as a by-product."""
    text = tree.read(SOURCE_FILE)
    calls = [c for c in commands(text, SOURCE_FILE) if c.name == "add_custom_command"]
    done = f"{SOURCE_FILE}: no file is made twice"
    if _MARK in text:
        return found((), now="", done=done)
    edits = [edit for call in calls for edit in _edits(call)]
    if not edits:
        return upstream(done)
    return found(edits, now=f"{SOURCE_FILE}: nccl.h is an output and a by-product", done=done)


def _edits(call: Command) -> list[Edit]:
    """Take BYPRODUCTS with what follows it out, if all of that is OUTPUT already."""
    outputs, products = _section(call, _OUTPUT), _section(call, _BYPRODUCTS)
    again = {argument.value for argument in products[1:]} & {each.value for each in outputs[1:]}
    if not again or len(again) != len(products) - 1:
        return []
    before = max(each.stop for each in call.arguments if each.stop <= products[0].start)
    return [Edit(SOURCE_FILE, before, products[-1].stop, _MARK, "nccl.h is made once")]


def _section(call: Command, keyword: str) -> list[Argument]:
    """A keyword and the arguments up to the next one; [] if it is not there."""
    section: list[Argument] = []
    for argument in call.arguments:
        if argument.value in _KEYWORDS:
            if section:
                break
            section = [argument] if argument.value == keyword else []
        elif section:
            section.append(argument)
    return section


def prove(stock: SourceTree, patched: SourceTree, request: Request, active: frozenset[str]) -> str:
    """CMake runs the build files: no custom command may make a file twice."""
    before, after = (configured(tree, request.target.cuda).outputs for tree in (stock, patched))
    if len(set(after)) != len(after) or not set(before) <= set(after):
        raise ProofError(f"custom commands make {', '.join(after)}, one of them twice")
    return f"custom commands make {len(after)} files, each once, where it was {len(before)}"


_HEADER = "${CMAKE_BINARY_DIR}/include/nccl.h"
_COMMAND = (
    "add_custom_command(\n"
    f"    OUTPUT {_HEADER}\n"
    "    COMMAND sed ${CMAKE_CURRENT_SOURCE_DIR}/nccl.h.in > "
    f"{_HEADER}"
)

FIX = Fix(
    id="cmake_ninja_header",
    title="The CMake build works with Ninja",
    symptom="ninja: error: include/nccl.h is defined as an output multiple times; an older ninja: "
    "multiple rules generate include/nccl.h",
    why="The command that makes nccl.h names it as its OUTPUT and under BYPRODUCTS. Make does not "
    "mind.",
    needs=(Need(">=2.28.7,<2.29", Severity.REQUIRED, "Ninja stops before it builds anything"),),
    upstream="2.29.2 took BYPRODUCTS out",
    evidence=(
        Evidence("2.28.9 with Ninja stops with this message", "cmake and ninja", "measured"),
        Evidence("src/CMakeLists.txt of 2.28.7 and 2.29.2", "upstream's repository", "read"),
        Evidence(
            "2.29.7 with that line put back stops, and with this fix builds",
            "cmake and ninja, tests/integration/patch/test_nccl_cmake.py",
            "measured",
        ),
    ),
    look=look,
    prove=prove,
    prove_from_stock=True,
    layer="build",
    majors=(9, 11, 12),
    examples=(
        Example(
            version="2.28.7",
            path=SOURCE_FILE,
            before=f"{_COMMAND}\n    BYPRODUCTS {_HEADER}\n)\n",
            after=f"{_COMMAND}{_MARK}\n)\n",
        ),
    ),
)
