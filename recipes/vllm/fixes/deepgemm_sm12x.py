"""DeepGEMM, switched on for SM12x one release before it can run there."""

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
