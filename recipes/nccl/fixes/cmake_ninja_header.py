"""A header that one command makes twice, which Ninja does not take."""

from patchkit.recipes.nccl import kit

_OUTPUT, _BYPRODUCTS = "OUTPUT", "BYPRODUCTS"
_KEYWORDS = frozenset({_OUTPUT, _BYPRODUCTS, "COMMAND", "DEPENDS", "COMMENT", "VERBATIM"})
_MARK = "\n    # nccl.h is the OUTPUT, and once is enough: Ninja stops at a second time."


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Look whether a custom command names one file both as its output and as a by-product."""
    text = tree.read(kit.SOURCE_FILE)
    calls = [c for c in kit.commands(text, kit.SOURCE_FILE) if c.name == "add_custom_command"]
    done = f"{kit.SOURCE_FILE}: no file is made twice"
    if _MARK in text:
        return kit.found((), now="", done=done)
    edits = []
    for call in calls:
        outputs, products = _section(call, _OUTPUT), _section(call, _BYPRODUCTS)
        again = {a.value for a in products[1:]} & {a.value for a in outputs[1:]}
        # BYPRODUCTS goes with what follows it, if all of that is OUTPUT already.
        if again and len(again) == len(products) - 1:
            before = max(a.stop for a in call.arguments if a.stop <= products[0].start)
            span = before, products[-1].stop
            edits.append(kit.Edit(kit.SOURCE_FILE, *span, _MARK, "nccl.h is made once"))
    if not edits:
        return kit.upstream(done)
    return kit.found(
        edits, now=f"{kit.SOURCE_FILE}: nccl.h is an output and a by-product", done=done
    )


def _section(call: kit.Command, keyword: str) -> list[kit.Argument]:
    """Return a keyword and the arguments up to the next one; [] if it is not there."""
    section: list[kit.Argument] = []
    for argument in call.arguments:
        if argument.value in _KEYWORDS:
            if section:
                break
            section = [argument] if argument.value == keyword else []
        elif section:
            section.append(argument)
    return section


def prove(case: kit.Case) -> str:
    """Run the build files in CMake: no custom command may make a file twice."""
    before, after = (
        kit.configured(tree, case.request.target.cuda).outputs
        for tree in (case.stock, case.patched)
    )
    if len(set(after)) != len(after) or not set(before) <= set(after):
        raise kit.ProofError(f"custom commands make {', '.join(after)}, one of them twice")
    return f"custom commands make {len(after)} files, each once, where it was {len(before)}"


_HEADER = "${CMAKE_BINARY_DIR}/include/nccl.h"
_COMMAND = (
    "add_custom_command(\n"
    f"    OUTPUT {_HEADER}\n"
    "    COMMAND sed ${CMAKE_CURRENT_SOURCE_DIR}/nccl.h.in > "
    f"{_HEADER}"
)

FIX = kit.Fix(
    id="cmake_ninja_header",
    title="The CMake build works with Ninja",
    symptom="ninja: error: include/nccl.h is defined as an output multiple times; an older ninja: "
    "multiple rules generate include/nccl.h",
    why="The command that makes nccl.h names it as its OUTPUT and under BYPRODUCTS. Make does not "
    "mind.",
    needs=(
        kit.Need(">=2.28.7,<2.29", kit.Severity.REQUIRED, "Ninja stops before it builds anything"),
    ),
    upstream="2.29.2 took BYPRODUCTS out",
    evidence=(
        kit.Evidence("2.28.9 with Ninja stops with this message", "cmake and ninja", "measured"),
        kit.Evidence("src/CMakeLists.txt of 2.28.7 and 2.29.2", "upstream's repository", "read"),
        kit.Evidence(
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
        kit.Example(
            version="2.28.7",
            path=kit.SOURCE_FILE,
            before=f"{_COMMAND}\n    BYPRODUCTS {_HEADER}\n)\n",
            after=f"{_COMMAND}{_MARK}\n)\n",
        ),
    ),
)
