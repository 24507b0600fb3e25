"""Compare what upstream's code decides on several devices, before and after a patch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import NamedTuple

from patchkit.errors import PatchkitError, ProofError
from patchkit.frozen import Values, positional
from patchkit.patching.fix import Case
from patchkit.proof import upstream_code
from patchkit.proof.questions import ask
from patchkit.proof.upstream_code import Code
from patchkit.recipes.vllm.decisions import on_device
from patchkit.source.tree import SourceTree


class Capability(NamedTuple):
    """A compute capability, with the fields of vLLM's own ``DeviceCapability``."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


# Devices whose routing a fix must not change, unless the fix is for them.
OTHERS = (Capability(8, 0), Capability(9, 0), Capability(10, 0))
SM12X = (Capability(12, 0), Capability(12, 1))
GB10 = (Capability(12, 1),)
ALL = (*OTHERS, *SM12X)


# The exceptions with which upstream's code says that it cannot run a layer.
_REFUSALS = (AssertionError, ImportError, NotImplementedError, ValueError)

Decide = Callable[[SourceTree, Capability], object]


def outcome(decide: Decide, tree: SourceTree, capability: Capability) -> object:
    """Return what a tree decides for a device.

    If upstream's code raises an exception of ``_REFUSALS``, return its type and text. Raises
    ProofError for any other exception, since that is no decision. ``questions.ask`` calls this
    function in a child process.
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


@positional
class Decision:
    """A decision of upstream's code that a fix changes.

    ``what`` names the decision, and ``decide`` asks the code for it. In a patched tree, the answer
    must be ``wanted`` on the devices ``changed``, and as before on all others. ``environ`` are the
    user's environment variables.
    """

    what: str
    decide: Callable[[Code], object]
    wanted: object
    changed: tuple[Capability, ...] = GB10
    environ: Values = field(default_factory=dict)

    @property
    def others(self) -> list[Capability]:
        return [capability for capability in ALL if capability not in self.changed]

    def ask(self, tree: SourceTree, capability: Capability) -> object:
        """Return what a tree decides on a device. Called in the child of ``questions.ask``."""
        return self.decide(on_device(tree, capability, self.environ))


def prove_decisions(case: Case, decisions: Sequence[Decision]) -> list[str]:
    """Prove that a patch has the wanted effect on the ``changed`` devices and none on all others.

    Return a sentence for each decision. Raises ProofError for the first answer that differs. One
    child process answers all questions.
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
    """Prove one decision as ``prove_decisions`` does, and return its sentence."""
    return prove_decisions(case, [Decision(what, decide, wanted, changed)])[0]
