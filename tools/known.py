"""Enter owners' proofs in docs/known.md: a row for each archive of `patchkit proof`.

    python -m tools.known ARCHIVE…

An archive is somebody else's: it is read within limits, nothing of it gets to a disk, and of its
words only plain ones get into the page. One that is there already changes nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from pathlib import Path

from patchkit.measure.proof_archive import (
    Proof,
    first_use_counts,
    most_bandwidth,
    read_proof,
    short_kernels,
)
from tools import run_program
from tools.markdown import replaced, table

PAGE = Path(__file__).parents[1] / "docs" / "known.md"
MARK = ("proofs", "python -m tools.known ARCHIVE…")
HEAD = (
    *("device", "driver", "vLLM", "date", "parts: ok, failed, not run", "compiled at first use"),
    *("first call of FlashAttention 2: cold, kept", "FP8; blocks; NVFP4; MXFP4"),
    *("serves after: cold, warm", "tokens/s: cold, warm", "NCCL: RoCE, sockets", "archive"),
)
_STRANGE = re.compile(r"[^A-Za-z0-9_ .,:;+()/-]+")
_WIDEST = 160  # characters of a cell


def main() -> int:
    """Add the rows that are not there; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive", nargs="+", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE)
    asked = parser.parse_args()
    text = asked.page.read_text(encoding="utf-8")
    rows = {row[-1]: row for row in read_rows(text)}
    for path in asked.archive:
        row = proof_row(read_proof(path), hashlib.sha256(path.read_bytes()).hexdigest())
        rows[row[-1]] = row
    made = table(HEAD, sorted(rows.values(), key=lambda row: (row[0], row[3], row[-1]))).rstrip()
    asked.page.write_text(replaced(text, *MARK, made), encoding="utf-8")
    return 0


def read_rows(text: str) -> list[list[str]]:
    """Return the rows that the page has, without its head."""
    between = text.partition(f"<!-- {MARK[0]}: {MARK[1]} -->")[2].partition(f"<!-- /{MARK[0]} -->")
    rows = [line.strip("| ").split(" | ") for line in between[0].splitlines() if line[:1] == "|"]
    return [row for row in rows[2:] if len(row) == len(HEAD)]


def proof_row(proof: Proof, sha256: str) -> list[str]:
    """Return the cells of one proof, each of plain characters."""
    counts = [sum(part.state == it for part in proof.parts) for it in ("ok", "failed", "not-run")]
    routing = [proof.part(f"routing-{it}") for it in ("fp8", "fp8-blocks", "nvfp4", "mxfp4")]
    starts = [proof.part(f"serve-{it}").figures for it in ("cold", "warm")]
    speeds = [most_bandwidth(proof.part(f"nccl-{it}")) for it in ("roce", "socket")]
    attention = proof.part("kernel-fa2").figures
    cells = [
        *(proof.device, proof.driver, proof.vllm, proof.date, ", ".join(map(str, counts))),
        "; ".join(f"{name} {count}" for name, count in first_use_counts(proof).items()),
        ", ".join(str(attention.get(f"first_{it}", "?")) for it in ("s", "kept_s")) + " s",
        "; ".join(short_kernels(part) or part.state for part in routing),
        ", ".join(str(its.get("ready_s", "?")) for its in starts) + " s",
        ", ".join(str(its.get("tokens_per_s", "?")) for its in starts),
        ", ".join(f"{it} GB/s" if it else "not run" for it in speeds),
    ]
    return [*(_STRANGE.sub("?", cell)[:_WIDEST] or "?" for cell in cells), sha256[:12]]


if __name__ == "__main__":
    run_program(main)
