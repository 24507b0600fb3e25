"""DeepGEMM, switched on for SM12x one release before it can run there."""

from textwrap import indent

from packaging.version import Version

from patchkit.recipes.vllm import kit

_PATH = "vllm/platforms/cuda.py"
_SCOPE = "CudaPlatformBase.support_deep_gemm"
_PIN_FILE = "cmake/external_projects/deepgemm.cmake"
_PIN_WITHOUT_SM12X = "891d57b4db1071624b5c8fa0d1e51cb317fa709f"
_PINNED_IN = Version("0.24.0")  # for installed packages, which carry no CMake files

# Up to 0.23 DeepGEMM is not offered to SM12x.
_WITHOUT_SM12X = (
    "return cls.is_device_capability(90) or cls.is_device_capability_family(100)\n"
)
_BEFORE = """\
return (
    cls.is_device_capability(90)
    or cls.is_device_capability_family(100)
    or cls.is_device_capability_family(120)
)
"""
_AFTER_OLD_PIN = f"""\
if cls.is_device_capability_family(120):
    logger.info_once(
        "patchkit: no DeepGEMM on SM12x, this release's has no kernels for it "
        "(deepgemm_sm12x)"
    )
    return False

{_BEFORE}"""
_AFTER = f"""\
if cls.is_device_capability((12, 1)) and not envs.is_set("VLLM_USE_DEEP_GEMM"):
    logger.info_once(
        "patchkit: DeepGEMM is off on 12.1, as in upstream's GB10 recipes; "
        "VLLM_USE_DEEP_GEMM=1 turns it on (deepgemm_sm12x)"
    )
    return False

{_BEFORE}"""


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read the pinned DeepGEMM: one without SM12x code must not be offered to any of them."""
    text = tree.read(_PATH)
    if _WITHOUT_SM12X in text:
        return kit.upstream(f"{_PATH}: DeepGEMM is not offered to SM12x")
    after = _AFTER_OLD_PIN if _lacks_sm12x(tree) else _AFTER
    edits = kit.swap(_PATH, text, _SCOPE, _BEFORE, after, note="not on SM12x")
    which = "SM12x" if after is _AFTER_OLD_PIN else "12.1"
    return kit.found(
        edits,
        now=f"{_PATH}: DeepGEMM is on for {which}",
        done=f"{_PATH}: DeepGEMM is off for {which}",
    )


def _lacks_sm12x(tree: kit.SourceTree) -> bool:
    if tree.kind == "installed":
        return Version(tree.version.public) == _PINNED_IN
    text = tree.read(_PIN_FILE)
    if "GIT_TAG" not in text:
        raise kit.altered(f"{_PIN_FILE}: pins no DeepGEMM")
    return _PIN_WITHOUT_SM12X in text


def prove(case: kit.Case) -> str:
    """Check that 12.1 (12.x while there is no kernel) gets no, and all others what they got."""
    return kit.prove_decision(
        case,
        "DeepGEMM",
        lambda code: code.names["current_platform"].support_deep_gemm(),
        wanted=False,
        changed=kit.SM12X if _lacks_sm12x(case.stock) else kit.GB10,
    )


def _method(body: str) -> str:
    head = "class CudaPlatformBase:\n    def support_deep_gemm(cls) -> bool:\n"
    return head + indent(body, " " * 8)


FIX = kit.Fix(
    title="DeepGEMM off on 12.1, and on SM12x while its pin has no kernels for them",
    symptom='"Unsupported architecture or scaling factor types" with a block-FP8 model in 0.24.0; '
    "later, DeepGEMM errors or slow prefill with such models.",
    why="0.24.0 offers DeepGEMM to family 120 and ranks it first, but still pins the revision that "
    "only branches on SM90 and SM100. Later pins have SM120 kernels; upstream's own recipes for "
    "the GB10 turn DeepGEMM off all the same. VLLM_USE_DEEP_GEMM=1 turns it on again from 0.25.",
    needs=(
        kit.required("==0.24.0", "block-FP8 models stop in DeepGEMM"),
        kit.recommended(
            ">=0.25", "upstream's GB10 recipes set VLLM_USE_DEEP_GEMM=0", target="gb10"
        ),
    ),
    upstream="0.25.0 pins a DeepGEMM with SM120 kernels; the default stays on",
    look=look,
    prove=prove,
    examples=(
        kit.Example(
            "0.24.0",
            _PATH,
            _method(_BEFORE),
            _method(_AFTER_OLD_PIN),
            beside={_PIN_FILE: f"GIT_TAG {_PIN_WITHOUT_SM12X}\n"},
        ),
        kit.Example(
            "0.25.1",
            _PATH,
            _method(_BEFORE),
            _method(_AFTER),
            beside={_PIN_FILE: "GIT_TAG a6b593d2826719dcf4892609af7b84ee23aaf32a\n"},
        ),
    ),
)
