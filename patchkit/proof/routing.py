"""What upstream's own code decides on devices of several capabilities, before and after a patch."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from patchkit.errors import PatchkitError, ProofError
from patchkit.source.tree import SourceTree


class Capability(NamedTuple):
    """Compute capability, as vLLM's own ``DeviceCapability`` spells it."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    def to_int(self) -> int:
        return self.major * 10 + self.minor


# Devices whose routing a fix must not change, beside those it is for.
OTHERS = (Capability(8, 0), Capability(9, 0), Capability(10, 0))
SM12X = (Capability(12, 0), Capability(12, 1))
GB10 = (Capability(12, 1),)


class Platform:
    """What the gates ask ``current_platform``, for a CUDA device of one capability."""

    def __init__(self, capability: Capability) -> None:
        self._capability = capability

    def is_cuda(self) -> bool:
        return True

    def get_device_capability(self) -> Capability:
        return self._capability

    def has_device_capability(self, wanted: int) -> bool:
        return self._capability.to_int() >= wanted

    def is_device_capability(self, wanted: int | tuple[int, int]) -> bool:
        return wanted in (self._capability, self._capability.to_int())

    def is_device_capability_family(self, wanted: int) -> bool:
        return self._capability.to_int() // 10 == wanted // 10


def function(path: str, text: str, scope: str, names: Mapping[str, object]) -> Any:
    """The function ``scope`` (``name`` or ``Class.name``) of a file, with ``names`` as its globals.

    Decorators are left off; a method comes back as a plain function. Raises ProofError if missing.
    """
    body: list[ast.stmt] = ast.parse(text).body
    *owners, name = scope.split(".")
    for owner in owners:
        body = next((n.body for n in body if isinstance(n, ast.ClassDef) and n.name == owner), [])
    found = [n for n in body if isinstance(n, ast.FunctionDef) and n.name == name]
    if len(found) != 1:
        raise ProofError(f"{path}: no function {scope} to run")
    node = found[0]
    node.decorator_list = []
    # Annotations may name types that are not there.
    future = ast.parse("from __future__ import annotations").body
    space: dict[str, Any] = dict(names)
    exec(compile(ast.Module([*future, node], []), path, "exec"), space)  # noqa: S102
    return space[name]


def importing(**names: object) -> dict[str, object]:
    """What ``function`` needs as ``__builtins__`` if imports within it are to find these names."""
    module = SimpleNamespace(annotations=None, **names)
    return {**vars(builtins), "__import__": lambda *_args: module}


def prove_routing(
    what: str,
    decide: Callable[[str, Capability], object],
    before: str,
    after: str,
    wanted: object,
    on: tuple[Capability, ...] = SM12X,
) -> str:
    """Show that a patch gives ``wanted`` where it should and leaves everybody else alone.

    ``decide(text, capability)`` runs the decision; ``before`` and ``after`` are the file's texts;
    ``on`` are the devices that the patch is for. Raises ProofError on the first difference; returns
    the sentence that was established.
    """
    others = [c for c in (*OTHERS, *SM12X) if c not in on]
    expected = {c: decide(before, c) for c in others} | dict.fromkeys(on, wanted)
    for capability, answer in expected.items():
        got = _answer(decide, after, capability)
        if got != answer:
            raise ProofError(
                f"{what} is {got!r} for {capability.major}.{capability.minor}, expected {answer!r}",
                why="the function was edited by hand, or decides by something else as well",
            )
    device = "12.x" if on == SM12X else ", ".join(map(_dotted, on))
    rest = ", ".join(map(_dotted, others[:-1]))
    return f"{what} is {wanted!r} for {device} and unchanged for {rest} and {_dotted(others[-1])}"


def _answer(
    decide: Callable[[str, Capability], object], text: str, capability: Capability
) -> object:
    try:
        return decide(text, capability)
    except PatchkitError:
        raise
    except Exception as error:  # noqa: BLE001  (whatever the code raises is its answer)
        return error


def _dotted(capability: Capability) -> str:
    return f"{capability.major}.{capability.minor}"


# How upstream says that it cannot run a layer.
_REFUSALS = (AssertionError, ImportError, NotImplementedError, ValueError)

Decide = Callable[[SourceTree, Capability], object]


def outcome(decide: Decide, tree: SourceTree, capability: Capability) -> object:
    """What is decided; a refusal of upstream's own is a decision too, in words.

    Raises ProofError if the code stumbles instead of deciding.
    """
    try:
        return decide(tree, capability)
    except PatchkitError:
        raise
    except _REFUSALS as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        raise ProofError(
            f"upstream's code cannot be run for {capability}: {type(error).__name__}: {error}",
            why="it was edited by hand, or asks for something that the proof does not know",
            hint="restore the file from the release, or leave the fix out with --skip",
        ) from error


def prove_decision(
    what: str,
    decide: Decide,
    stock: SourceTree,
    patched: SourceTree,
    *,
    wanted: object,
    changed: tuple[Capability, ...] = GB10,
) -> str:
    """Show that a patch gives ``wanted`` on ``changed`` devices and leaves all others alone.

    Raises ProofError on the first difference; returns the sentence that was established.
    """
    for capability in (*OTHERS, *SM12X):
        same = capability not in changed
        expected = outcome(decide, stock, capability) if same else wanted
        got = outcome(decide, patched, capability)
        if got != expected:
            raise ProofError(
                f"{what}: {got} on {capability}, expected {expected}",
                why="the code was edited by hand, or decides by something else as well",
            )
    others = ", ".join(str(c) for c in (*OTHERS, *SM12X) if c not in changed)
    return f"{what}: {wanted} on {' and '.join(map(str, changed))}, unchanged on {others}"
