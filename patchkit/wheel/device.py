"""Whether the code in a wheel that patchkit made reaches the device that it was made for."""

from __future__ import annotations

from collections.abc import Iterator

from patchkit.errors import ProofError, SourceError
from patchkit.target import Load, Target
from patchkit.wheel.finding import Finding, finding
from patchkit.wheel.inspect import prove_exact
from patchkit.wheel.manifest import MANIFEST
from patchkit.wheel.shelf import Wheel


def unfit(wheel: Wheel) -> Iterator[Finding]:
    """What is wrong with a built wheel for the device that patchkit.json in it names."""
    facts = wheel.about.facts if wheel.about else {}
    if not wheel.built or not facts:
        return
    if dict(wheel.entry.facts) != dict(facts):
        yield finding(
            SourceError,
            wheel.filename,
            f"patchkit.json in it does not say what {MANIFEST} says",
            "build it again",
            "one of the two was edited",
        )
    if wheel.target is None:
        what = f"patchkit.json in it names no known target: {facts.get('target')!r}"
        yield finding(SourceError, wheel.filename, what, "build it again, or update patchkit")
    elif facts.get("project") == "nccl":
        yield from _not_exact(wheel, wheel.target)
    else:
        yield from _not_loading(wheel, wheel.target)


def _not_exact(wheel: Wheel, target: Target) -> Iterator[Finding]:
    assert wheel.about
    for binary in wheel.binaries:
        try:
            prove_exact(binary, target, cpu=wheel.about.facts.get("machine"))
        except ProofError as error:
            yield finding(ProofError, wheel.filename, error.what, error.hint, error.why)


def _not_loading(wheel: Wheel, target: Target) -> Iterator[Finding]:
    code = [binary for binary in wheel.binaries if binary.live]
    if code and all(binary.load(target) is Load.NONE for binary in code):
        yield finding(
            ProofError,
            wheel.filename,
            f"none of its {len(code)} libraries with device code loads on {target.title}",
            f"build it from source for {target.name}",
        )
