"""MXFP4 MoE (gpt-oss) on SM12x before upstream chose Marlin there."""

from patchkit.recipes.vllm import kit

_PATH = "vllm/model_executor/layers/quantization/mxfp4.py"
_SCOPE = "get_mxfp4_backend"
_UPSTREAM = "(9, 0) <= current_platform.get_device_capability() < (11, 0)"
_BEFORE = "current_platform.get_device_capability()[0] < 9"
_AFTER = f"({_BEFORE} or _marlin_on_sm12x())"
_HELPER = '''\
def _marlin_on_sm12x() -> bool:
    """Whether gpt-oss takes Marlin because Triton's kernels do not run: on SM12x."""
    capability = current_platform.get_device_capability()
    if not current_platform.is_cuda() or capability is None or capability[0] < 12:
        return False
    logger.info_once(
        "patchkit: MXFP4 MoE layers take Marlin on SM12x, where Triton's kernels do not "
        "run (mxfp4_moe_marlin)"
    )
    return True
'''


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read the range of capabilities that Triton's MXFP4 kernels are trusted with."""
    if (
        not tree.exists(_PATH)
        or _UPSTREAM in (text := tree.read(_PATH))
        or _SCOPE not in text
    ):
        return kit.upstream(f"{_PATH}: Triton is limited to 9.0 and 10.x")
    edits = kit.wrap(
        _PATH, text, _SCOPE, _BEFORE, _AFTER, _HELPER, note="Marlin on SM12x"
    )
    return kit.found(
        edits, now=f"{_PATH}: SM12x takes Triton", done=f"{_PATH}: SM12x takes Marlin"
    )


def prove(case: kit.Case) -> str:
    """Check that 12.x takes Marlin, and all others what they took before."""
    return kit.prove_decision(
        case, "MXFP4 MoE", _decide_backend, wanted="MARLIN", changed=kit.SM12X
    )


def _decide_backend(code: kit.Code) -> object:
    code.put(_PATH, "has_triton_kernels", lambda: True)
    code.put(_PATH, "is_torch_equal_or_newer", lambda _version: True)
    return code.get(_PATH, _SCOPE)(False).name


FIX = kit.Fix(
    title="MXFP4 MoE (gpt-oss) takes Marlin on SM12x",
    symptom="gpt-oss fails inside triton_kernels on vLLM 0.11.1 or 0.11.2.",
    why="Every capability from 9.0 on takes triton_kernels if they are installed; on SM12x they "
    "lacked what they need.",
    needs=(
        kit.required(">=0.11.1,<0.12", "Triton's MXFP4 kernels do not run on SM12x"),
    ),
    upstream="0.12.0 limits Triton to 9.0 and 10.x",
    look=look,
    prove=prove,
    examples=(
        kit.Example(
            "0.11.2",
            _PATH,
            f"def {_SCOPE}(with_lora_support):\n    return {_BEFORE}\n",
            f"{_HELPER}\n\ndef {_SCOPE}(with_lora_support):\n    return {_AFTER}\n",
        ),
    ),
)
