"""Read tables of names that releases bring and drop: first and last release, and default.

A row is ``name<TAB>first<TAB>last<TAB>default``; a name whose default changed, or that came back,
has several, in the order of their releases. Lines that begin with # are comments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from patchkit.errors import SourceError
from patchkit.runtime.rules.releases import release

Release = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """A name between two releases, both included; ``default`` is empty where it is not set."""

    name: str
    first: str
    last: str
    default: str


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a file, with what their releases are as numbers."""

    rows: tuple[tuple[Lifetime, Release, Release], ...]
    # An index: `check` looks up every name of a file.
    _by_name: dict[str, list[Lifetime]] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        for row, _first, _last in self.rows:
            self._by_name.setdefault(row.name, []).append(row)

    @property
    def oldest(self) -> Release:
        """Return the first release that the table knows."""
        return min(first for _, first, _ in self.rows)

    @property
    def newest(self) -> str:
        """Return the last release that the table knows; what later ones bring is unknown."""
        return max(self.rows, key=lambda row: row[2])[0].last

    def at(self, version: str) -> dict[str, str]:
        """Return name → default in a release; ``""`` is any release, the newest one of each name.

        A release between two of the table, or a development version, counts as the one before it,
        which is the newest one for whatever is newer than the table. Raises UsageError.
        """
        if not version:
            return {row.name: row.default for row, _, _ in self.rows}
        edges = {edge for _, first, last in self.rows for edge in (first, last)}
        wanted = release(version)
        # Older than the table counts as its first release.
        found = max((edge for edge in edges if edge <= wanted), default=min(edges))
        return {row.name: row.default for row, first, last in self.rows if first <= found <= last}

    def lifetime(self, name: str) -> Lifetime | None:
        """Return a name's first and last release, with its last default; None if it is unknown."""
        rows = self._by_name.get(name)
        if not rows:
            return None
        first, last = rows[0], rows[-1]
        return Lifetime(name=name, first=first.first, last=last.last, default=last.default)


@cache
def read_table(*places: Path) -> Table:
    """Return the rows of files, one after the other. Raises SourceError."""
    return Table(tuple(row for place in places for row in _table_rows(place)))


def _table_rows(place: Path) -> Iterator[tuple[Lifetime, Release, Release]]:
    try:
        text = place.read_text(encoding="utf-8")
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, first, last, default = line.split("\t")
                row = Lifetime(name=name, first=first, last=last, default=default)
                yield row, release(first), release(last)
    except (OSError, ValueError) as error:
        raise SourceError(
            f"{place}: {getattr(error, 'strerror', None) or error}",
            why="this installation of patchkit is incomplete or was edited",
            hint="install patchkit again",
        ) from None


def render(releases: Mapping[str, Mapping[str, str]], heading: Sequence[str]) -> str:
    """Return the text of a table; ``releases`` is release → name → default, oldest first."""
    names = list(releases)
    rows: dict[str, list[list[str]]] = {}
    for before, version in zip([None, *names], names, strict=False):  # each with the former one
        for name, default in releases[version].items():
            known = rows.setdefault(name, [])
            # A row goes on while its default stays; a gap or a new default begins another.
            if known and known[-1][1:] == [before, default]:
                known[-1][1] = version
            else:
                known.append([version, version, default])
    lines = [f"{name}\t{chr(9).join(row)}" for name in sorted(rows) for row in rows[name]]
    return "".join(f"{line}\n" for line in [*(f"# {line}" for line in heading), *lines])
