"""Whether the code in a wheel that patchkit made reaches the device that it was made for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from patchkit.errors import ProofError, SourceError
from patchkit.finding import Finding, finding
from patchkit.target import Load, Target
from patchkit.wheel.device.inspect import Binary, prove_exact
from patchkit.wheel.device.libraries import Judged, from_source, judge, told
from patchkit.wheel.file.metadata import About
from patchkit.wheel.wheelhouse.listed_wheel import Wheel
from patchkit.wheel.wheelhouse.manifest import MANIFEST


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
    elif facts.get("project") == "vllm":
        assert wheel.about
        judged = judgements(wheel.about, wheel.place, wheel.binaries, wheel.target)
        fatal = [each for each in judged if each.fatal]
        yield from missed(wheel.about, fatal, wheel.target, wheel.filename)
    else:
        yield from _not_loading(wheel, wheel.target)


def judgements(
    wheel: About, place: Path, binaries: Sequence[Binary], target: Target
) -> tuple[Judged, ...]:
    """What each library of a vLLM wheel is to the device; nothing for another project's wheel."""
    if wheel.name.project != "vllm":
        return ()
    return judge(place, binaries, target, wheel.name.version)


def missed(
    wheel: About, judged: Sequence[Judged], target: Target, filename: str = ""
) -> Iterator[Finding]:
    """Libraries that the device lacks, and what that costs."""
    for each in judged:
        if each.missed:
            yield finding(
                ProofError,
                filename or each.name,
                f"{each.name} {told(each)}" if filename else told(each),
                from_source(wheel.name.version, target),
                "vLLM cannot do without it" if each.fatal else "vLLM does without it",
            )


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
