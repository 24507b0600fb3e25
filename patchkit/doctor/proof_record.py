"""Hold a proof, and make its archive and the summary in it."""

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, field
from typing import Any, Literal

from patchkit.doctor.archive import FieldMap, pack_archive, take_out_names
from patchkit.doctor.first_use import count_compiled
from patchkit.doctor.gpu_steps import GpuStep
from patchkit.doctor.private_names import PrivateNames
from patchkit.frozen import Values, frozen
from patchkit.quoting import visible
from patchkit.records import record

SCHEMA: Literal[2] = 2
_LONG = re.compile(r"(ScaledMM)?(Linear)?Kernel\b")
_SUMMARY_FIGURES = (
    "error",
    "microseconds_8",
    "most_gigabytes_per_second",
)
_SUMMARY_LINES = 20  # unless reasons take more
_WIDTH = 80


@frozen
class Proof:
    """The content of proof.json.

    ``code`` is library of vLLM → device code → number of fat binaries that hold it.
    ``machines`` and ``findings`` are those of a report of doctor. ``parts`` have no lines: these
    are files of logs in the archive. ``seconds`` is the time for the whole proof; some parts ran
    at the same time. ``step`` is what `bench --why` kept last on this machine, {} for nothing.
    """

    schema: Literal[2]
    patchkit: str
    date: str
    device: str
    capability: str
    driver: str
    vllm: str
    torch: str
    parts: tuple[GpuStep, ...]
    code: Mapping[str, Mapping[str, int]]
    machines: tuple[Mapping[str, Any], ...]
    findings: tuple[Mapping[str, Any], ...]
    seconds: float = 0.0
    step: Mapping[str, Any] = field(default_factory=dict)


def pack_proof(
    proof: Proof,
    logs: Values,
    names: PrivateNames,
) -> tuple[Proof, bytes]:
    """Return a proof without private names, and the bytes of its archive.

    The same proof gives the same bytes.
    """
    content = asdict(proof, dict_factory=FieldMap)
    clean = take_out_names(content, logs, names, paths=True)

    clean_proof = record(Proof, clean.content)
    return clean_proof, pack_archive("proof", clean, summary_lines(clean_proof))


# The summary


def summary_lines(proof: Proof) -> list[str]:
    """Return the lines to read first, 80 characters wide.

    Every reason is shown in full. Figures of parts follow while there are less than 20 lines.
    """
    shown = []
    for text in (*_head_lines(proof), *_reason_lines(proof)):
        shown += _wrapped(text)

    for part in reversed(proof.parts):
        if part.state == "ok" and len(shown) < _SUMMARY_LINES:
            shown += _wrapped(_figures_line(part))

    return shown


def _head_lines(proof: Proof) -> Iterator[str]:
    """Yield the device and its software, the number of parts by state, and what is compiled."""
    counts = Counter(part.state for part in proof.parts)
    states = [f"{counts[state]} {state}" for state in ("ok", "failed", "not-run")]
    yield f"patchkit {proof.patchkit}, {proof.date}: {proof.device} ({proof.capability or '?'})"
    yield f"driver {proof.driver or '?'}, vLLM {proof.vllm or '?'}, torch {proof.torch or '?'}"

    yield f"parts: {', '.join(states)}; {proof.seconds:.0f} s"
    if proof.code and proof.capability:
        yield f"compiled at first use: {first_use(proof) or 'nothing'}"


def _reason_lines(proof: Proof) -> Iterator[str]:
    """Yield why parts failed or were not run: each reason once with its parts, failures first."""
    names_by_reason: dict[str, list[str]] = {}
    for state in ("failed", "not-run"):
        for part in reversed(proof.parts):
            if part.state == state:
                kernels = short_kernels(part)
                name = f"{part.step} ({kernels})" if kernels else part.step

                reason = f"{state}: {part.reason}"
                names_by_reason.setdefault(reason, []).append(name)

    for reason, names in names_by_reason.items():
        shown = f"{len(names)} parts" if len(names) > 2 else ", ".join(names)
        yield f"{shown}: {reason}"


def _figures_line(part: GpuStep) -> str:
    words = [short_kernels(part)]

    words += [
        f"{name} {part.figures[name]}"
        for name in _SUMMARY_FIGURES
        if name in part.figures
    ]

    shown = ", ".join(word for word in words if word not in part.step)
    return f"{part.step}: {shown}"


def _wrapped(text: str) -> list[str]:
    """Return a text as lines of at most 80 characters; all but the first are indented."""
    plain = " ".join(visible(text).split())

    return textwrap.wrap(plain, _WIDTH, subsequent_indent="  ") or [""]


def first_use(proof: Proof) -> str:
    """Return what the device compiles, such as ``_C 3 of 40`` (fat binaries), by library.

    Return "" if nothing is compiled, or if the capability is not known.
    """
    shown = []
    libraries = count_compiled(proof.code, proof.capability)
    for name, (compiled, loaded) in libraries.items():
        stem = name.partition(".")[0]
        short = stem.removesuffix("_stable_libtorch").strip("_")
        shown.append(f"{short} {compiled} of {loaded}")

    return ", ".join(shown)


def short_kernels(part: GpuStep) -> str:
    return _LONG.sub("", part.kernel)
