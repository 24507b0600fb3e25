"""Run one function of an upstream file, with stand-ins for the platform, for several capabilities.

Only the function is compiled, not its module: no torch, no CUDA, no import of vLLM.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from patchkit.errors import ProofError


class Capability(NamedTuple):
    """Compute capability, as vLLM's own ``DeviceCapability`` spells it."""

    major: int
    minor: int

    def to_int(self) -> int:
        return self.major * 10 + self.minor


# Devices whose routing a fix must not change, beside those it is for.
OTHERS = (Capability(8, 0), Capability(9, 0), Capability(10, 0))
SM12X = (Capability(12, 0), Capability(12, 1))


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

    def is_device_capability(self, wanted: int) -> bool:
        return self._capability.to_int() == wanted

    def is_device_capability_family(self, wanted: int) -> bool:
        return self._capability.to_int() // 10 == wanted // 10


class Anything:
    """Stands for loggers and the like: any attribute, any call, nothing done."""

    def __getattr__(self, name: str) -> Anything:
        return self

    def __call__(self, *_args: object, **_kwargs: object) -> Anything:
        return self


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


def prove_routing(
    what: str, decide: Callable[[str, Capability], object], before: str, after: str, wanted: object
) -> str:
    """Show that a patch gives ``wanted`` on SM12x and leaves everybody else alone.

    ``decide(text, capability)`` runs the decision; ``before`` and ``after`` are the file's texts.
    Raises ProofError on the first difference; returns the sentence that was established.
    """
    expected = {c: decide(before, c) for c in OTHERS} | dict.fromkeys(SM12X, wanted)
    for capability, answer in expected.items():
        got = decide(after, capability)
        if got != answer:
            raise ProofError(
                f"{what} is {got!r} for {capability.major}.{capability.minor}, expected {answer!r}",
                why="the function was edited by hand, or decides by something else as well",
            )
    return f"{what} is {wanted!r} for 12.x and unchanged for 8.0, 9.0 and 10.0"
