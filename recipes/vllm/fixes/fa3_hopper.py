"""FlashAttention 3, whose kernels are for Hopper, built for every device."""

import ast
from functools import partial
from itertools import product
from types import SimpleNamespace

from packaging.version import Version

from patchkit.recipes.vllm import kit

_PATH = "setup.py"
_EXTENSION = f"vllm.vllm_flash_attn.{kit.FA3}"
_BEFORE = f'ext_modules.append(CMakeExtension(name="{_EXTENSION}"))'
_AFTER = f"pass  # {kit.FA3}: its kernels are for 9.x alone (fa3_hopper)"
_CMAKE = "cmake/external_projects/vllm_flash_attn.cmake"


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Look whether setup.py asks CMake for FlashAttention 3."""
    text = tree.read(_PATH)
    if kit.FA3 not in text:
        raise kit.absent(f"{_PATH}: knows no {kit.FA3}")
    edits = kit.swap_text(_PATH, text, _BEFORE, _AFTER, note="for 9.x alone")
    return kit.found(
        edits,
        now=f"{_PATH}: builds {kit.FA3}",
        done=f"{_PATH}: does not build {kit.FA3}",
    )


def prove(case: kit.Case) -> str:
    """Check that all else is built and installed, and that vLLM decides as if it were there."""
    _require_twins(case.patched)

    def decide(wished: int | None, built: tuple[str, ...]) -> dict[str, object]:
        capability = case.request.target.capability
        tree = case.patched
        code = kit.attention_code(tree, capability, built=built, version=wished)
        return kit.flash_attention(code, tree)

    choices = product((None, 3), ((kit.FA2, kit.FA3), (kit.FA2,)))
    questions = [
        partial(_extensions, case.stock),
        partial(_extensions, case.patched),
        *(partial(decide, *choice) for choice in choices),
    ]
    answers = kit.ask(case.patched, questions, dict[str, object])
    stock, patched, *decided = answers
    if [*patched] != [name for name in stock if name != _EXTENSION]:
        raise kit.ProofError(
            f"{_PATH}: builds {', '.join(patched)}, before {', '.join(stock)}"
        )

    with_fa3 = decided[::2]
    without = decided[1::2]
    if with_fa3 != without or without[0].get("version") != 2:
        title = case.request.target.title
        raise kit.ProofError(
            f"attention on {title}: {without} without {kit.FA3}, {with_fa3} with",
            why="upstream uses FlashAttention 3 on this device",
            hint="leave the fix out with --without fa3_hopper, and report this release",
        )
    return f"{kit.FA3} is not built; attention takes FlashAttention 2, as with it"


def _require_twins(tree: kit.SourceTree) -> None:
    """Raise ProofError unless FlashAttention 2 brings the Python that comes with 3."""
    calls = [call.values for call in kit.commands(tree.read(_CMAKE), _CMAKE)]
    for call in calls:
        if kit.FA3 not in call or kit.FA2 in call:
            continue
        twin = tuple(kit.FA2 if value == kit.FA3 else value for value in call)
        if twin not in calls:
            raise kit.ProofError(
                f"{_CMAKE}: what is installed with {kit.FA3} is not with {kit.FA2}",
                hint="leave the fix out with --without fa3_hopper, and report this release",
            )


def _extensions(tree: kit.SourceTree) -> dict[str, object]:
    """Run the statements of setup.py that list the extensions, as a build with CUDA 13 does."""
    listed: list[str] = []
    names: dict[str, object] = {
        "CUDA_HOME": "/usr/local/cuda",
        "USE_PRECOMPILED_EXTENSIONS": False,
        "envs": SimpleNamespace(VLLM_USE_PRECOMPILED=False),
        "get_nvcc_cuda_version": lambda: Version("13.0"),
        "Version": Version,
        "CMakeExtension": lambda name, **_options: name,
        "ext_modules": listed,
        **dict.fromkeys(("_is_cuda", "_build_custom_ops"), lambda: True),
        **dict.fromkeys(("_is_hip", "_is_cpu"), lambda: False),
    }
    space = kit.Code(tree, names).module(_PATH)
    for node in space.source.body:
        if isinstance(node, ast.If) and "ext_modules.append" in ast.unparse(node):
            kit.execute(compile(ast.Module([node], []), _PATH, "exec"), space)
    return dict.fromkeys(listed)


_SETUP = """\
if _is_cuda():
    ext_modules.append(CMakeExtension(name="vllm.vllm_flash_attn._vllm_fa2_C"))
    if USE_PRECOMPILED_EXTENSIONS or (
        CUDA_HOME and get_nvcc_cuda_version() >= Version("12.3")
    ):
        # FA3 requires CUDA 12.3 or later
        {}
"""

FIX = kit.Fix(
    title="FlashAttention 3 is not built for devices that cannot run it",
    symptom="192 of 349 CUDA sources of a build of 0.25.1 are flash-attention's hopper/*.cu; nvcc "
    "compiles them to sm_75 code.",
    why="setup.py asks for _vllm_fa3_C whatever the device is. For 12.1 its arch list is empty, so "
    "nvcc gets no -gencode at all and compiles for its own default, in vain: vLLM takes "
    "FlashAttention 3 on 9.x alone, and guards the import. FlashAttention 2 is built as before.",
    needs=(
        kit.recommended(
            ">=0.11.1", "with flash-attention, half of what is compiled is for nothing"
        ),
    ),
    upstream="not in 0.33.0: setup.py still asks for it; vllm#28205 is about the same",
    look=look,
    prove=prove,
    layer="build",
    majors=(11, 12),
    examples=(
        kit.Example(
            "0.25.1",
            _PATH,
            _SETUP.format(_BEFORE),
            _SETUP.format(_AFTER),
        ),
    ),
)
