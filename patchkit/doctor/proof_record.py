"""Hold a proof: what its archive says, its summary, and how somebody else's archive is read."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from patchkit.doctor.archive import FieldMap, pack_archive, take_out_names
from patchkit.doctor.first_use import count_loads
from patchkit.doctor.gpu_steps import GpuStep
from patchkit.doctor.private_names import PrivateNames
from patchkit.quoting import visible
from patchkit.records import matching, record
from patchkit.target import Load

SCHEMA: Literal[1] = 1
_LONG = re.compile(r"(ScaledMM)?(Linear)?Kernel\b")
_FIGURES = (  # in a line of the summary
    *(
        "ready_s",
        "tokens_per_s",
        "cores_busy",
        "cores_idle",
        "first_s",
        "first_kept_s",
        "error",
    ),
    *("microseconds_8", "most_gigabytes_per_second"),
)
_LINES = 20  # of a summary, unless reasons take more
_WIDTH = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What proof.json holds.

    ``code`` has, of each library of vLLM, how many fat binaries hold which device code.
    ``machines`` and ``findings`` are doctor's. ``parts`` are without their lines, which are logs;
    ``seconds`` is how long all took, some of them side by side.
    """

    schema: Literal[1]
    patchkit: str
    date: Annotated[str, matching(r"\d{4}-\d\d-\d\d", "a date")]
    device: str
    capability: str
    driver: str
    vllm: str
    torch: str
    model: str
    parts: tuple[GpuStep, ...]
    code: Mapping[str, Mapping[str, int]]
    machines: tuple[Mapping[str, Any], ...]
    findings: tuple[Mapping[str, Any], ...]
    seconds: float = 0.0

    def part(self, name: str) -> GpuStep:
        """Return a part, one that was not run if there is none of that name."""
        none = GpuStep(step=name, state="not-run", reason="it is not in the archive")
        return next((part for part in self.parts if part.step == name), none)


def pack_proof(
    proof: Proof, logs: Mapping[str, str], names: PrivateNames
) -> tuple[Proof, bytes]:
    """Return a proof without private names, and its archive: the same bytes for the same proof."""
    content = asdict(proof, dict_factory=FieldMap)
    clean = take_out_names(content, logs, names, paths=True)
    clean_proof = record(Proof, clean.content)
    return clean_proof, pack_archive("proof", clean, summary_lines(clean_proof))


# What it says in a few lines


def summary_lines(proof: Proof) -> list[str]:
    """Return what a person reads first, 80 characters wide: 20 lines, and every reason whole."""
    shown = []
    for text in (*_head_lines(proof), *_reason_lines(proof)):
        shown += _wrapped(text)

    for part in reversed(proof.parts):
        if part.state == "ok" and len(shown) < _LINES:
            shown += _wrapped(_figures_line(part))
    return shown


def _head_lines(proof: Proof) -> Iterator[str]:
    """Yield what was tried, how many parts went well, and what the device has to compile."""
    counts = Counter(part.state for part in proof.parts)
    states = ", ".join(
        f"{counts[state]} {state}" for state in ("ok", "failed", "not-run")
    )
    yield f"patchkit {proof.patchkit}, {proof.date}: {proof.device} ({proof.capability or '?'})"
    yield f"driver {proof.driver or '?'}, vLLM {proof.vllm or '?'}, torch {proof.torch or '?'}"
    yield f"parts: {states}; {proof.seconds:.0f} s"
    if proof.code and proof.capability[:1].isdigit():
        yield f"compiled at first use: {first_use(proof) or 'nothing'}"


def _reason_lines(proof: Proof) -> list[str]:
    """Return why parts failed or were not run: each reason once, failures first."""
    reasons: dict[str, list[str]] = {}
    for state in ("failed", "not-run"):
        for part in reversed(proof.parts):
            if part.state == state:
                kernels = short_kernels(part)
                name = f"{part.step} ({kernels})" if kernels else part.step
                reasons.setdefault(f"{state}: {part.reason}", []).append(name)
    return [
        f"{', '.join(names) if len(names) < 3 else f'{len(names)} parts'}: {reason}"
        for reason, names in reasons.items()
    ]


def _figures_line(part: GpuStep) -> str:
    figures = (
        f"{name} {part.figures[name]}" for name in _FIGURES if name in part.figures
    )
    words = [word for word in (short_kernels(part), *figures) if word not in part.step]
    return f"{part.step}: {', '.join(words)}"


def _wrapped(text: str) -> list[str]:
    """Return a text in lines; the later ones are indented."""
    plain = " ".join(visible(text).split())
    return textwrap.wrap(plain, _WIDTH, subsequent_indent="  ") or [""]


def first_use(proof: Proof) -> str:
    """Return how many fat binaries of a library the device compiles, of those that it uses."""
    found = []
    if not re.fullmatch(r"\d{1,2}\.\d", proof.capability):
        return ""
    for name, loads in count_loads(proof.code, proof.capability, proof.vllm).items():
        short = name.partition(".")[0].removesuffix("_stable_libtorch").strip("_")
        if loads[Load.JIT]:
            found.append(
                f"{short} {loads[Load.JIT]} of {loads.total() - loads[Load.NONE]}"
            )
    return ", ".join(found)


def short_kernels(part: GpuStep) -> str:
    return _LONG.sub("", part.kernel)
