"""What upstream's own code decides on devices of several capabilities, before and after a patch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from patchkit.errors import PatchkitError, ProofError
from patchkit.source.tree import SourceTree


class Capability(NamedTuple):
    """Compute capability, as vLLM's own ``DeviceCapability`` spells it."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


# Devices whose routing a fix must not change, beside those it is for.
OTHERS = (Capability(8, 0), Capability(9, 0), Capability(10, 0))
SM12X = (Capability(12, 0), Capability(12, 1))
GB10 = (Capability(12, 1),)


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
