"""Compare what upstream's code decides on several devices, before and after a patch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from patchkit.errors import PatchkitError, ProofError
from patchkit.patching.fix import Case
from patchkit.proof import upstream_code
from patchkit.proof.questions import ask
from patchkit.proof.upstream_code import Code
from patchkit.recipes.vllm.decisions import on_device
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
ALL = (*OTHERS, *SM12X)


# How upstream says that it cannot run a layer.
_REFUSALS = (AssertionError, ImportError, NotImplementedError, ValueError)

Decide = Callable[[SourceTree, Capability], object]


def outcome(decide: Decide, tree: SourceTree, capability: Capability) -> object:
    """Return what is decided; a refusal of upstream's own is a decision too, in words.

    ``questions.ask`` calls it. Raises ProofError if the code stumbles instead of deciding.
    """
    try:
        return decide(tree, capability)
    except PatchkitError:
        raise
    except _REFUSALS as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        raise ProofError(
            f"{upstream_code.place(error)}upstream's code cannot be run for {capability}: "
            f"{type(error).__name__}: {error}",
            why="it was edited by hand, or asks for something that the proof does not know",
            hint="restore the file from the release, or leave the fix out with --without",
        ) from error


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision, and the way to ask the code of a device for it.

    ``wanted`` is the answer on devices where it changes; ``environ`` holds the user's variables.
    """

    what: str
    decide: Callable[[Code], object]
    wanted: object
    changed: tuple[Capability, ...] = GB10
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def others(self) -> list[Capability]:
        return [capability for capability in ALL if capability not in self.changed]

    def ask(self, tree: SourceTree, capability: Capability) -> object:
        """Return what a tree decides on a device. It is called within ``questions.ask``."""
        return self.decide(on_device(tree, capability, self.environ))


def prove_decisions(case: Case, decisions: Sequence[Decision]) -> list[str]:
    """Show that a patch gives what is wanted on ``changed`` devices and leaves all others alone.

    One child answers for all of them. Raises ProofError on the first difference; returns a sentence
    about each decision.
    """
    questions = [
        partial(outcome, decision.ask, tree, capability)
        for decision in decisions
        for tree, capabilities in ((case.patched, ALL), (case.stock, decision.others))
        for capability in capabilities
    ]

    answers = iter(ask(case.stock, questions, object))

    sentences = []
    for decision in decisions:
        after = dict(zip(ALL, answers, strict=False))
        before = dict(zip(decision.others, answers, strict=False))
        _require_expected(decision, before, after)

        changed = " and ".join(map(str, decision.changed))
        others = ", ".join(map(str, decision.others))
        sentences.append(
            f"{decision.what}: {decision.wanted} on {changed}, unchanged on {others}"
        )
    return sentences


def _require_expected(
    decision: Decision,
    before: Mapping[Capability, object],
    after: Mapping[Capability, object],
) -> None:
    for capability, answer in after.items():
        expected = before.get(capability, decision.wanted)
        if answer != expected:
            raise ProofError(
                f"{decision.what}: {answer} on {capability}, expected {expected}",
                why="the code was edited by hand, or decides by something else as well",
            )


def prove_decision(
    case: Case,
    what: str,
    decide: Callable[[Code], object],
    *,
    wanted: object,
    changed: tuple[Capability, ...] = GB10,
) -> str:
    """Show what ``prove_decisions`` shows, for one."""
    return prove_decisions(case, [Decision(what, decide, wanted, changed)])[0]
