"""Enter owners' proofs in docs/known.md: a row for each archive of `patchkit proof`.

    python -m tools.known ARCHIVE…

An archive is somebody else's: it is read within limits, nothing of it gets to a disk, and of its
words only plain ones get into the page. One that is there already changes nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import tarfile
import zlib
from pathlib import Path

from patchkit.doctor.gpu_steps import GpuStep
from patchkit.doctor.proof_record import Proof, first_use, short_kernels
from patchkit.errors import SourceError
from patchkit.reading import read_bytes
from patchkit.records import RecordError, read_json
from patchkit.units import BYTES_PER_MIB
from tools import run_program

PAGE = Path(__file__).parents[1] / "docs" / "known.md"
END = "\n<!-- /proofs -->"
_STRANGE = re.compile(r"[^A-Za-z0-9_ .,:;+()/-]+")
_WIDEST = 160  # characters of a cell
_PACKED = 4 * BYTES_PER_MIB  # of an archive, at most
_UNPACKED = 32 * BYTES_PER_MIB
_MOST_MEMBERS = 64
_MEMBER = re.compile(
    r"(?:proof|manifest)\.json|summary\.txt|logs/[a-z0-9.-]{1,60}\.txt"
)


def main() -> int:
    """Add the rows that are not there; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive", nargs="+", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE)
    asked = parser.parse_args()
    text = asked.page.read_text(encoding="utf-8")
    for path in asked.archive:
        packed = read_bytes(path, limit=_PACKED)
        name = hashlib.sha256(packed).hexdigest()[:12]
        if name not in text:
            cells = [*proof_cells(parse_proof(packed, str(path))), name]
            text = text.replace(END, f"| {' | '.join(cells)} |\n{END}")
    asked.page.write_text(text, encoding="utf-8")
    return 0


def parse_proof(packed: bytes, name: str) -> Proof:
    """Return the proof in the bytes of an archive; nothing gets to a disk. Raise SourceError."""
    texts: dict[str, bytes] = {}
    try:
        unpacker = zlib.decompressobj(wbits=31)
        unpacked = unpacker.decompress(packed, _UNPACKED)
        if not unpacker.eof:
            limit = f"{_UNPACKED >> 20} MiB"
            raise SourceError(f"{name}: is cut short, or more than {limit} unpacked")
        with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as archive:
            for member in archive:
                # A sparse file would be as large as it says.
                is_file = member.isreg() and not member.issparse()
                is_known = _MEMBER.fullmatch(member.name) and member.name not in texts
                stream = archive.extractfile(member) if is_file and is_known else None
                if stream is None or len(texts) >= _MOST_MEMBERS:
                    shown = repr(member.name[:60])
                    raise SourceError(f"{name}: {shown} is nothing of a proof")
                texts[member.name] = stream.read()
        return read_json(Proof, texts.get("proof.json", b""))
    except (zlib.error, tarfile.TarError, RecordError, UnicodeError) as error:
        why = "it was edited, or is of another version of patchkit"
        raise SourceError(f"{name}: is no proof: {error}", why=why) from None


def proof_cells(proof: Proof) -> list[str]:
    """Return what the page's table has of a proof, in plain characters."""
    counts = [
        sum(part.state == it for part in proof.parts)
        for it in ("ok", "failed", "not-run")
    ]
    routing = [
        _part(proof, f"routing-{it}") for it in ("fp8", "fp8-blocks", "nvfp4", "mxfp4")
    ]
    paths = [_part(proof, f"nccl-{it}").figures for it in ("roce", "socket")]
    speeds = [its.get("most_gigabytes_per_second") for its in paths]
    cells = [
        *(
            proof.device,
            proof.driver,
            proof.vllm,
            proof.date,
            ", ".join(map(str, counts)),
        ),
        first_use(proof),
        "; ".join(short_kernels(part) or part.state for part in routing),
        ", ".join(f"{it} GB/s" if it else "not run" for it in speeds),
    ]
    return [_STRANGE.sub("?", cell)[:_WIDEST] or "?" for cell in cells]


def _part(proof: Proof, name: str) -> GpuStep:
    """Return the part of a name; one with the state "not-run" if the archive lacks it."""
    for part in proof.parts:
        if part.step == name:
            return part
    return GpuStep(step=name, state="not-run", reason="it is not in the archive")


if __name__ == "__main__":
    run_program(main)
