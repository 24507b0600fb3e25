"""Hold a proof: one archive without private names, its summary, and what may be read of others'."""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from patchkit.doctor.bundle import PrivateNames, pack_report
from patchkit.doctor.first_use import count_loads
from patchkit.doctor.gpu_steps import GpuStep
from patchkit.errors import SourceError
from patchkit.quoting import visible
from patchkit.records import RecordError, matching, read_json
from patchkit.target import Load
from patchkit.units import BYTES_PER_MIB

SCHEMA: Literal[1] = 1
PACKED = 4 * BYTES_PER_MIB  # what is read of an archive at most
_UNPACKED, _MOST = 32 * BYTES_PER_MIB, 64
_MEMBER = re.compile(r"proof\.json|summary\.txt|logs/[a-z0-9.-]{1,60}\.txt")
_LONG = re.compile(r"(ScaledMM)?(Linear)?Kernel\b")
_FIGURES = (  # in a line of the summary
    *("ready_s", "tokens_per_s", "cores_busy", "cores_idle", "first_s", "first_kept_s", "error"),
    *("microseconds_8", "most_gigabytes_per_second"),
)
_LINES, _WIDTH = 20, 80  # of a summary


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
    note: str = ""
    taken_out: Mapping[str, int] = field(default_factory=dict)

    def part(self, name: str) -> GpuStep:
        """Return a part, one that was not run if there is none of that name."""
        none = GpuStep(step=name, state="not-run", reason="it is not in the archive")
        return next((part for part in self.parts if part.step == name), none)


def pack_proof(proof: Proof, logs: Mapping[str, Any], names: PrivateNames) -> tuple[Proof, bytes]:
    """Return a proof as it may be shown, and its archive: the same bytes for the same proof."""
    text, taken = pack_report({"proof": asdict(proof), "logs": dict(logs)}, names)
    whole = json.loads(text)
    texts = {f"logs/{name}.txt": said for name, said in whole["logs"].items()}
    clean = {**whole["proof"], "note": whole["note"], "taken_out": taken}
    texts["proof.json"] = json.dumps(clean, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    found = read_json(Proof, texts["proof.json"])
    texts["summary.txt"] = "".join(f"{line}\n" for line in summary_lines(found))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in sorted(texts):
            data = texts[name].encode("utf-8", "replace")
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    archive_bytes = gzip.compress(packed.getvalue(), mtime=0)
    return parse_proof(archive_bytes, "the archive that was made"), archive_bytes


def parse_proof(packed: bytes, name: str) -> Proof:
    """Return what the bytes of an archive say; nothing gets to a disk. Raises SourceError."""
    try:
        unpacker = zlib.decompressobj(wbits=31)
        unpacked = unpacker.decompress(packed, _UNPACKED)
        if not unpacker.eof:
            raise SourceError(f"{name}: is cut short, or more than {_UNPACKED >> 20} MiB unpacked")
        texts = {}
        with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as archive:
            for number, member in enumerate(archive):
                # A sparse one would be as large as it says.
                plain = member.isreg() and not member.issparse() and number < _MOST
                fits = plain and _MEMBER.fullmatch(member.name)
                stream = archive.extractfile(member) if fits else None
                if stream is None or member.name in texts:
                    raise SourceError(f"{name}: {member.name[:60]!r} is nothing of a proof")
                texts[member.name] = stream.read()
        return read_json(Proof, texts.get("proof.json", b""))
    except (zlib.error, tarfile.TarError, RecordError, UnicodeError) as error:
        why = "it was edited, or is of another version of patchkit"
        raise SourceError(f"{name}: is no proof: {error}", why=why) from None


# What it says in a few lines


def summary_lines(proof: Proof) -> list[str]:
    """Return what a person reads first: 20 lines of 80 characters at most."""
    counts = Counter(part.state for part in proof.parts)
    told = ", ".join(f"{counts[state]} {state}" for state in ("ok", "failed", "not-run"))
    lines = [
        f"patchkit {proof.patchkit}, {proof.date}: {proof.device} ({proof.capability or '?'})",
        f"driver {proof.driver or '?'}, vLLM {proof.vllm or '?'}, torch {proof.torch or '?'}",
        f"parts: {told}; {proof.seconds:.0f} s",
    ]
    if proof.code and proof.capability[:1].isdigit():
        lines.append(f"compiled at first use: {first_use(proof) or 'nothing'}")
    reasons: dict[str, list[str]] = {}
    fine = []
    for part in reversed(proof.parts):
        said = short_kernels(part)
        if part.state != "ok":
            names = reasons.setdefault(f"{part.state}: {part.reason}", [])
            names.append(f"{part.step} ({said})" if said else part.step)
        else:
            said_figures = (f"{it} {part.figures[it]}" for it in _FIGURES if it in part.figures)
            words = [word for word in (said, *said_figures) if word not in part.step]
            fine.append(f"{part.step}: {', '.join(words)}")
    for reason, names in reasons.items():
        lines.append(f"{', '.join(names) if len(names) < 3 else f'{len(names)} parts'}: {reason}")
    shown = [" ".join(visible(line).split()) for line in [*lines, *fine][:_LINES]]
    return [line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…" for line in shown]


def first_use(proof: Proof) -> str:
    """Return how many fat binaries of a library the device compiles, of those that it uses."""
    found = []
    if not re.fullmatch(r"\d{1,2}\.\d", proof.capability):
        return ""
    for name, loads in count_loads(proof.code, proof.capability).items():
        short = name.partition(".")[0].removesuffix("_stable_libtorch").strip("_")
        if loads[Load.JIT]:
            found.append(f"{short} {loads[Load.JIT]} of {loads.total() - loads[Load.NONE]}")
    return ", ".join(found)


def short_kernels(part: GpuStep) -> str:
    return _LONG.sub("", part.kernel)
