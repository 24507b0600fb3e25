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
from pathlib import Path
from typing import Annotated, Any, Literal

from patchkit.doctor.bundle import PrivateNames, pack_report
from patchkit.doctor.gpu_steps import GpuStep
from patchkit.errors import SourceError
from patchkit.quoting import visible
from patchkit.reading import read_bytes
from patchkit.records import RecordError, matching, read_json
from patchkit.target import Load, best_load, listed
from patchkit.units import BYTES_PER_MIB

SCHEMA: Literal[1] = 1
_PACKED, _UNPACKED, _MOST = 4 * BYTES_PER_MIB, 32 * BYTES_PER_MIB, 64
_MEMBER = re.compile(r"proof\.json|summary\.txt|logs/[a-z0-9.-]{1,60}\.txt")
_CODE = re.compile(r"\b(?:sm|compute)_\d{2,3}[af]?\b")
_LONG = re.compile(r"\w*(Method|FusedMoE|Experts\w*)$|(ScaledMM)?(Linear)?Kernel$")
_TOLD = ("gpu-device", "gpu-triton")
_LINES, _WIDTH = 20, 80  # of a summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What proof.json holds.

    ``code`` has, of each library of vLLM, how many fat binaries hold which device code.
    ``machines`` and ``findings`` are doctor's. ``parts`` are without their lines, which are logs.
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


def read_proof(path: Path) -> Proof:
    """Return what an archive says, which may be anybody's. Raises SourceError, StorageError."""
    return parse_proof(read_bytes(path, limit=_PACKED), str(path))


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
        f"parts: {told}; {sum(part.seconds for part in proof.parts):.0f} s",
    ]
    if proof.code and proof.capability:
        compiled = (f"{name} {count}" for name, count in first_use_counts(proof).items())
        lines.append(f"compiled at first use: {', '.join(compiled) or 'nothing'}")
    fine = [part for part in proof.parts if part.state == "ok"]
    for kind in ("serve-", "routing-", "nccl-", "gpu-"):
        lines += [
            _part_line(it) for it in fine if it.step.startswith(kind) and it.step not in _TOLD
        ]
    calls = [it for it in fine if it.step.startswith("kernel-")]
    keys = ("first_s", "first_kept_s", "error")
    cells = [" ".join([it.step[7:], *(str(it.figures.get(key)) for key in keys)]) for it in calls]
    lines += [
        f"first, kept s, error: {'; '.join(cells[at : at + 2])}" for at in range(0, len(cells), 2)
    ]
    reasons: dict[str, list[str]] = {}
    for part in proof.parts:
        if part.state != "ok":
            chose = f" ({short_kernels(part)})" if part.kernel else ""
            reasons.setdefault(f"{part.state}: {part.reason}", []).append(part.step + chose)
    for reason, names in reasons.items():
        lines.append(f"{', '.join(names) if len(names) < 3 else f'{len(names)} parts'}: {reason}")
    shown = [" ".join(visible(line).split()) for line in lines[:_LINES]]
    return [line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…" for line in shown]


def first_use_counts(proof: Proof) -> dict[str, str]:
    """Return how many fat binaries of a library the device compiles, of those that it uses."""
    if not re.fullmatch(r"\d{1,2}\.\d", proof.capability):
        return {}
    major, minor = map(int, proof.capability.split("."))
    found = {}
    for name, codes in proof.code.items():
        loads = Counter[Load | None]()
        for names, count in codes.items():
            loads[best_load(listed(_CODE.findall(names)), (major, minor))] += count
        used = sum(count for load, count in loads.items() if load not in (None, Load.NONE))
        if loads[Load.JIT]:
            short = name.partition(".")[0].removesuffix("_stable_libtorch").strip("_")
            found[short] = f"{loads[Load.JIT]} of {used}"
    return found


def _part_line(part: GpuStep) -> str:
    its = part.figures
    if part.step.startswith("nccl-"):
        return f"{part.step}: {its.get('microseconds_8')} us; {most_bandwidth(part)} GB/s"
    if part.step.startswith("serve-"):
        start = f"{part.step}: serves after {its.get('ready_s')} s; {its.get('tokens_per_s')} tok/s"
        return f"{start}; cores {its.get('cores_busy')}, idle {its.get('cores_idle')}"
    error = f", error {its['error']}" if "error" in its else ""
    return f"{part.step}: {short_kernels(part)}{error}"


def short_kernels(part: GpuStep) -> str:
    """Return the kernels that a part took, in short; what was not quantised is left out."""
    words = dict.fromkeys(word for word in part.kernel.split() if "Unquantized" not in word)
    short = [_LONG.sub("", word.strip(",")) for word in words]
    return ", ".join(dict.fromkeys(filter(None, short)))


def most_bandwidth(part: GpuStep) -> float:
    """Return the largest GB/s of all sizes, 0 if none was measured."""
    its = (value for name, value in part.figures.items() if name.startswith("gigabytes"))
    return max((float(value) for value in its if isinstance(value, int | float)), default=0.0)
