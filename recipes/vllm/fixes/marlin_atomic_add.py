"""The default of VLLM_MARLIN_USE_ATOMIC_ADD, which is no cure for anything."""

from functools import partial
from types import SimpleNamespace

from patchkit.recipes.vllm import kit

_ENVS = "vllm/envs.py"
_NAME = "VLLM_MARLIN_USE_ATOMIC_ADD"
_FUNCTION = "_marlin_use_atomic_add"
_READER = "vllm/model_executor/layers/quantization/utils/marlin_utils.py"
_READS = "should_use_atomic_add_reduce"

_TABLE = "environment_variables: dict[str, Callable[[], Any]] = {\n"
# The decision is taken where the variable is read, not in should_use_atomic_add_reduce: that one is
# traced by torch.compile, whose cache is keyed by the values of these variables.
_DEFAULT = f'''
def {_FUNCTION}() -> bool:
    """What the user says; otherwise on for a GB10, and for nothing else."""
    if "{_NAME}" in os.environ:
        return os.environ["{_NAME}"] == "1"
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return False
    if not current_platform.is_device_capability((12, 1)):
        return False
    init_logger(__name__).info_once(
        "patchkit: dense Marlin uses atomic adds on 12.1 (marlin_atomic_add); "
        "{_NAME}=0 turns them off."
    )
    return True


'''
_ENTRY = f'    "{_NAME}": '
_STOCK = (
    f'lambda: os.environ.get(\n        "{_NAME}", "0"\n    )\n    == "1",\n',  # to 0.19.1
    f'lambda: (\n        os.environ.get("{_NAME}", "0") == "1"\n    ),\n',
)


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read the entry of the variable, and the function that takes its place."""
    text = tree.read(_ENVS)
    stock = next((form for form in _STOCK if _ENTRY + form in text), _STOCK[-1])
    edits = [
        *kit.swap_text(_ENVS, text, _TABLE, _DEFAULT + _TABLE, note="on by default on 12.1"),
        *kit.swap_text(
            _ENVS, text, _ENTRY + stock, f"{_ENTRY}{_FUNCTION},\n", note="on by default on 12.1"
        ),
    ]
    return kit.found(
        edits,
        now=f"{_ENVS}: {_NAME} is off unless set",
        done=f"{_ENVS}: {_NAME} is on for 12.1 unless set",
    )


def prove(case: kit.Case) -> str:
    """Check that only an unset variable on 12.1 changes, and that dense Marlin obeys a set one."""
    values: dict[str, dict[str, str]] = {"unset": {}, "0": {_NAME: "0"}, "1": {_NAME: "1"}}
    decisions = [
        kit.Decision(
            f"{_NAME} ({said})",
            lambda code: getattr(code.names["envs"], _NAME),
            wanted=said != "0",
            environ=environ,
        )
        for said, environ in values.items()
    ]
    proved, *_ = kit.prove_decisions(case, decisions)
    asked = [partial(_dense_marlin, case.patched, value) for value in "01"]
    answers = kit.ask(case.patched, asked, object)
    if answers != [False, True]:
        raise kit.ProofError(
            f"{_READER}: {_READS} does not follow {_NAME}",
            why="the function was edited by hand, or decides by something else as well",
        )
    return f"{proved}; a value that the user sets is kept"


def _dense_marlin(tree: kit.SourceTree, value: str) -> object:
    """Return whether a small dense layer on 12.1 reduces with atomic adds."""
    code = kit.on_device(tree, kit.GB10[0], {_NAME: value})
    cuda = SimpleNamespace(get_device_capability=lambda _device: kit.GB10[0])
    code.put(_READER, "torch", SimpleNamespace(bfloat16="bfloat16", cuda=cuda))
    code.put(_READER, "maybe_warn_marlin_atomic_add_env", kit.Anything())
    device = SimpleNamespace(type="cuda")
    return code.get(_READER, _READS)(1, 1024, 4096, device, "bfloat16")


FIX = kit.Fix(
    id="marlin_atomic_add",
    title="Atomic adds in dense Marlin by default on 12.1 (asked for, but no cure)",
    symptom='Guides say that "VLLM_MARLIN_USE_ATOMIC_ADD=1 is required for Marlin on SM121".',
    why="It is not. Marlin MoE passes use_atomic_add=False whatever the variable says (0.12 and "
    "later), so it cannot have been the cure for wrong MoE output: that came from Marlin without "
    "SM12x code, which marlin_sass builds. In dense layers (n below 2048, k from 2048 on) atomic "
    "adds are a matter of speed, and they add in no fixed order: equal requests may differ. This "
    "fix only makes the guides' setting the default, for those who want it; VLLM_MARLIN_USE_ATOMIC"
    "_ADD=0 still turns it off.",
    needs=(
        kit.Need(
            ">=0.11.1", kit.Severity.OPTIONAL, "speed of small dense layers; costs determinism"
        ),
    ),
    upstream="never; the default is 0 in every release",
    evidence=(
        kit.Evidence(
            "the function that decides is one and the same in all releases; its callers are dense "
            "layers",
            "vLLM marlin_utils*.py",
            "read",
        ),
        kit.Evidence(
            "fused Marlin MoE passes use_atomic_add=False from 0.12.0 on",
            "fused_marlin_moe.py, experts/marlin_moe.py",
            "read",
        ),
        kit.Evidence("12 of 12 outputs differ with atomic adds", "sglang#39455", "reported"),
        kit.Evidence(
            "corrupted Marlin MoE output went from 14 of 30 to 0 of 30 with SM12x code",
            "vllm#40923",
            "reported",
        ),
    ),
    look=look,
    prove=prove,
    examples=tuple(
        kit.Example(
            version=version,
            path=_ENVS,
            before=f"{_TABLE}{_ENTRY}{stock}}}\n",
            after=f"{_DEFAULT}{_TABLE}{_ENTRY}{_FUNCTION},\n}}\n",
        )
        for version, stock in zip(("0.19.1", "0.33.0"), _STOCK, strict=True)
    ),
)
