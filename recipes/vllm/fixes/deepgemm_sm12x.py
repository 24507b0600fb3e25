"""DeepGEMM, switched on for SM12x one release before it can run there."""

from __future__ import annotations

from packaging.version import Version

from patchkit.edit.python import swap
from patchkit.errors import DriftError
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
from patchkit.proof.routing import Capability, Platform, function, prove_routing
from patchkit.source.tree import SourceTree

_PATH = "vllm/platforms/cuda.py"
_SCOPE = "CudaPlatformBase.support_deep_gemm"
_PIN_FILE = "cmake/external_projects/deepgemm.cmake"
_PIN_WITHOUT_SM12X = "891d57b4db1071624b5c8fa0d1e51cb317fa709f"
_PINNED_IN = Version("0.24.0")  # for installed packages, which carry no CMake files

_BEFORE = """\
return (
    cls.is_device_capability(90)
    or cls.is_device_capability_family(100)
    or cls.is_device_capability_family(120)
)
"""
_AFTER = """\
# The DeepGEMM pinned by this release has no SM12x kernels.
return cls.is_device_capability(90) or cls.is_device_capability_family(100)
"""


def look(tree: SourceTree, request: Request) -> Finding:
    """The pinned DeepGEMM decides: only one without SM12x code must not be offered."""
    if not _lacks_sm12x(tree):
        return upstream(f"{_PIN_FILE}: the pinned DeepGEMM is another one")
    edits = swap(_PATH, tree.read(_PATH), _SCOPE, _BEFORE, _AFTER, note="not on SM12x")
    return found(
        edits,
        now=f"{_PATH}: DeepGEMM is on for SM12x",
        done=f"{_PATH}: DeepGEMM is off for SM12x",
    )


def _lacks_sm12x(tree: SourceTree) -> bool:
    if tree.kind == "installed":
        return Version(tree.version.public) == _PINNED_IN
    text = tree.read(_PIN_FILE)
    if "GIT_TAG" not in text:
        raise DriftError(f"{_PIN_FILE}: pins no DeepGEMM", why="upstream moved the pin")
    return _PIN_WITHOUT_SM12X in text


def prove(stock: SourceTree, patched: SourceTree, request: Request, active: frozenset[str]) -> str:
    """12.x must get no; everybody else what they got before."""
    return prove_routing(_SCOPE, _decide, stock.read(_PATH), patched.read(_PATH), wanted=False)


def _decide(text: str, capability: Capability) -> object:
    return function(_PATH, text, _SCOPE, {})(Platform(capability))


FIX = Fix(
    id="deepgemm_sm12x",
    title="DeepGEMM off on SM12x while its pin has no SM12x kernels",
    symptom='"Unsupported architecture or scaling factor types" with a block-FP8 model in 0.24.0.',
    why="0.24.0 offers DeepGEMM to family 120 and ranks it first, but still pins the revision that "
    "only branches on SM90 and SM100.",
    needs=(Need("==0.24.0", Severity.REQUIRED, "block-FP8 models stop in DeepGEMM"),),
    upstream="0.25.0 pins a DeepGEMM with SM120 kernels",
    evidence=(
        Evidence("arch_major branches of both pins", "DeepGEMM 891d57b4, a6b593d2", "read"),
        Evidence(
            "a device that reports 12.1 is routed to DeepGEMM",
            "0.25.1 with the capability reported as 12.1",
            "measured",
        ),
    ),
    look=look,
    prove=prove,
    examples=(
        Example(
            version="0.24.0",
            path=_PATH,
            beside={_PIN_FILE: f"GIT_TAG {_PIN_WITHOUT_SM12X}\n"},
            before=f"class CudaPlatformBase:\n    def support_deep_gemm(cls) -> bool:\n        "
            f"{_BEFORE.strip().replace(chr(10), chr(10) + ' ' * 8)}\n",
            after=f"class CudaPlatformBase:\n    def support_deep_gemm(cls) -> bool:\n        "
            f"{_AFTER.strip().replace(chr(10), chr(10) + ' ' * 8)}\n",
        ),
    ),
)
