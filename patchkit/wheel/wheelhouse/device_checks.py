"""Check that the code in a wheel that patchkit made reaches the device that it was made for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from packaging.version import Version

from patchkit.errors import ProofError, SourceError
from patchkit.finding import Finding, finding
from patchkit.target import Load, Target
from patchkit.wheel.device.inspect import prove_exact
from patchkit.wheel.device.libraries import Judged, from_source
from patchkit.wheel.wheelhouse.listed_wheel import ListedWheel
from patchkit.wheel.wheelhouse.manifest import MANIFEST


def unfit(wheel: ListedWheel) -> Iterator[Finding]:
    """Find what is wrong with a built wheel for the device that patchkit.json in it names."""
    facts = wheel.metadata.facts if wheel.metadata else {}
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
    target, code = wheel.target, [binary for binary in wheel.binaries if binary.live]
    if target is None:
        what = f"patchkit.json in it names no known target: {facts.get('target')!r}"
        yield finding(SourceError, wheel.filename, what, "build it again, or update patchkit")
    elif facts.get("project") == "nccl":
        for binary in wheel.binaries:
            try:
                prove_exact(binary, target, cpu=facts.get("machine"))
            except ProofError as error:
                yield finding(ProofError, wheel.filename, error.what, error.hint, error.why)
    elif facts.get("project") == "vllm":
        fatal = [library for library in wheel.judged if library.fatal]
        yield from missed(wheel.entry.name.version, fatal, target, wheel.filename)
    elif code and all(binary.load(target) is Load.NONE for binary in code):
        yield finding(
            ProofError,
            wheel.filename,
            f"none of its {len(code)} libraries with device code loads on {target.title}",
            f"build it from source for {target.name}",
        )


def missed(
    version: Version, judged: Sequence[Judged], target: Target, filename: str = ""
) -> Iterator[Finding]:
    """Find libraries of vLLM that the device lacks, and say what that costs."""
    for library in judged:
        if library.missed:
            yield finding(
                ProofError,
                filename or library.name,
                f"{library.name} {library.phrase}" if filename else library.phrase,
                from_source(version, target),
                "vLLM cannot do without it" if library.fatal else "vLLM does without it",
            )
