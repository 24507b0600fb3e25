"""Write tables into pages, row by row: rows of what was not run stay as they were seen last."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.markdown import replaced, table

DOCS = Path(__file__).parents[3] / "docs"
_ROW = re.compile(r"(?m)^\| (`[\w-]+`) \| (.*) \|$")
_BAR = re.compile(r" (?<!\\)\| ")


@dataclass(frozen=True, kw_only=True)
class PageTable:
    """A table of a page between marks; ``maker`` is the command that writes it."""

    page: str
    name: str
    maker: str
    header: tuple[str, ...]

    @property
    def head(self) -> str:
        return table(self.header, [])

    def line(self, row: Sequence[str]) -> str:
        """Return a row as the table has it."""
        return table(row, []).splitlines(keepends=True)[0]

    def written(self, text: str, rows: Iterable[Sequence[str]], order: Sequence[str]) -> str:
        """Return a page with these rows in its table, in this order; rows of others stay."""
        between = text.partition(f"<!-- {self.name}: ")[2].partition(f"<!-- /{self.name} -->")[0]
        kept = {
            name: (name, *(cell.replace(r"\|", "|") for cell in _BAR.split(rest)))
            for name, rest in _ROW.findall(between)
        }
        known = kept | {row[0]: row for row in rows}
        places = [f"`{name}`" for name in order]
        made = table(self.header, [known[p] for p in places if p in known]).strip()
        return replaced(text, self.name, self.maker, made)

    def write(self, rows: Iterable[Sequence[str]], order: Sequence[str]) -> None:
        """Write the page anew."""
        place = DOCS / self.page
        text = self.written(place.read_text(encoding="utf-8"), rows, order)
        place.write_text(text, encoding="utf-8")


FAILURES = PageTable(
    page="lifecycle.md",
    name="table",
    maker="nox -s lifecycle -- --write",
    header=("scenario", "what happens", "s", "outcome"),
)
FAULTS = PageTable(
    page="doctor.md",
    name="faults",
    maker="nox -s doctor-proof -- --write",
    header=("fault", "what was made", "found as", "the cure that it printed", "cured", "s"),
)
