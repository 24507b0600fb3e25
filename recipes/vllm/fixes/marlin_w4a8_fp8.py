"""The run-time checks that refuse Marlin W4A8-FP8 on capability 12.1."""

from functools import partial

from patchkit.recipes.vllm import kit

_PYTHON = "vllm/model_executor/layers/quantization/utils/marlin_utils.py"
_SCOPE = "get_marlin_input_dtype"
_FAMILY = "current_platform.is_device_capability_family(120)"
_CAPABILITY = "not current_platform.is_device_capability(120)"
_CAPABILITIES = (
    "not (current_platform.is_device_capability(120) "
    "or current_platform.is_device_capability(121))"
)
_SOURCES = "csrc/**/*marlin*/*.cu"
_MESSAGE = "Marlin W4A8-FP8 only support"
_DEVICE = "            major_capability * 10 + minor_capability == 120,\n"
_DEVICES = "            major_capability == 12,\n"


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read the check in Python, and one in each C++ file that carries the message."""
    sources = [] if tree.kind == "installed" else tree.containing(_SOURCES, _MESSAGE)

    def check_in_python() -> kit.Edits:
        text = tree.read(_PYTHON)
        form = (_PYTHON, text, _SCOPE, _CAPABILITY, _CAPABILITIES)
        return [] if _FAMILY in text else kit.swap(*form, note="12.1 as well")

    places = [
        partial(
            kit.swap_text, path, tree.read(path), _DEVICE, _DEVICES, note="any SM12x"
        )
        for path in sources
    ]
    edits = kit.together(check_in_python, *places)
    checked = kit.places([*sources, _PYTHON])
    return kit.found(
        edits,
        now=f"{checked}: W4A8-FP8 is refused on 12.1",
        done=f"{checked}: W4A8-FP8 is allowed on 12.1",
    )


def prove(case: kit.Case) -> str:
    """Check that Python takes the request on 12.1, and refuses it where it did before."""
    fp8 = {"VLLM_MARLIN_INPUT_DTYPE": "fp8"}
    decision = kit.Decision(
        "Marlin W4A8-FP8", _decide_backend, wanted="allowed", environ=fp8
    )
    return kit.prove_decisions(case, [decision])[0]


def _decide_backend(code: kit.Code) -> object:
    code.put(_PYTHON, "QuantFP8", kit.Anything())
    code.get(_PYTHON, _SCOPE)("")  # raises ValueError where it refuses
    return "allowed"


FIX = kit.Fix(
    title="Marlin W4A8-FP8 allowed on 12.1",
    symptom='"Marlin W4A8-FP8 only support SM89 or SM120 device" with VLLM_MARLIN_INPUT_DTYPE=fp8.',
    why="The checks compare the capability with exactly 120; the kernels are the same on 12.1.",
    needs=(
        kit.recommended(
            ">=0.12,<0.23", "VLLM_MARLIN_INPUT_DTYPE=fp8 is refused", target="gb10"
        ),
    ),
    upstream="0.22.0 (Python and MoE) and 0.23.0 (dense) accept SM12x",
    look=look,
    prove=prove,
    examples=(
        kit.Example(
            "0.19.1",
            _PYTHON,
            f"def {_SCOPE}(prefix):\n    return {_CAPABILITY}\n",
            f"def {_SCOPE}(prefix):\n    return {_CAPABILITIES}\n",
        ),
    ),
)
