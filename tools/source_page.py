"""The table of CUDA sources in docs/build-vllm.md, from tests/data/sources.csv."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tools.markdown import replaced, table
from tools.seen import Row

MAKER = "nox -s regenerate"
RECORDED = "0.25.1"  # sources of flash-attention were counted at its pin
_HEAD = ("release", "library", "CUDA sources", "exact", "PTX only", "dead weight", "other code")
_COLUMNS = ("sources", "exact", "ptx", "dead", "foreign")


def page(text: str, rows: Sequence[Row], releases: Sequence[str]) -> str:
    """Return docs/build-vllm.md with its table of the newest release and the recorded one."""
    shown = [cells for release in releases for cells in _release(rows, release)]
    return replaced(text, "sources", MAKER, table(_HEAD, shown).rstrip("\n"))


def _release(rows: Sequence[Row], release: str) -> Iterator[list[str]]:
    own = [row for row in rows if (row["release"], row["arch"]) == (release, "native")]
    built = [row for row in own if row["tree"] == "patched"]
    names = {row["library"] for row in built}
    left_out = [row for row in own if row["tree"] == "stock" and row["library"] not in names]
    for row in (*built, *left_out):
        name = f"`{row['library']}`" + (", left out by a fix" if row in left_out else "")
        yield [release, name, *(row[column] or "not known" for column in _COLUMNS)]
