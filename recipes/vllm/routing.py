"""What upstream's own code decides on devices of several capabilities, before and after a patch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from patchkit.errors import PatchkitError, ProofError
from patchkit.proof import running
from patchkit.proof.asking import ask
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
    """Return what is decided; a refusal of upstream's own is a decision too, in words.

    It is asked within ``asking.ask``. Raises ProofError if the code stumbles instead of deciding.
    """
    try:
        return decide(tree, capability)
    except PatchkitError:
        raise
    except _REFUSALS as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        raise ProofError(
            f"{running.place(error)}upstream's code cannot be run for {capability}: "
            f"{type(error).__name__}: {error}",
            why="it was edited by hand, or asks for something that the proof does not know",
            hint="restore the file from the release, or leave the fix out with --without",
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
    capabilities = (*OTHERS, *SM12X)
    others = [c for c in capabilities if c not in changed]
    questions = [(patched, c) for c in capabilities] + [(stock, c) for c in others]
    answers = ask(stock, [partial(outcome, decide, *question) for question in questions])
    before = dict(zip(others, answers[len(capabilities) :], strict=True))
    for capability, got in zip(capabilities, answers, strict=False):
        expected = before.get(capability, wanted)
        if got != expected:
            raise ProofError(
                f"{what}: {got} on {capability}, expected {expected}",
                why="the code was edited by hand, or decides by something else as well",
            )
    same = ", ".join(map(str, others))
    return f"{what}: {wanted} on {' and '.join(map(str, changed))}, unchanged on {same}"
