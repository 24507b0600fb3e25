"""Compare releases with ranges, and read the data of recipes/env: names, variables, errors.

Only the standard library is used, since a node may have no `packaging`. A development version or
pre-release counts as the release that it leads to: ``0.33.1.dev12+g1a2b`` is in ``>=0.33.1``,
because it already has most of what the release brings.

A row of a table is ``name<TAB>first<TAB>last<TAB>default``: the first and the last release that
have the name, and its default there. A name whose default changed, or that came back, has several
rows, in the order of releases. Lines that begin with # are comments.
"""

import operator
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

from patchkit import errors
from patchkit.errors import UsageError
from patchkit.finding import fill_texts
from patchkit.frozen import Fields, Values, frozen
from patchkit.records import RECIPES, read_toml, read_tsv
from patchkit.runtime.rules.vllm_names import variable_readers

_HOME = RECIPES / "env"
_RELEASE = r"v?(?:\d+!)?(?P<release>\d+(?:\.\d+)*)(?![\d!])"
_BOUND = r"\s*(?P<sign>>=|<=|==|!=|>|<)\s*(?P<release>\d+(?:\.\d+)*)\s*"
LONGEST = 100  # characters of a version; int() refuses thousands of digits
_COMPARISONS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


@lru_cache(maxsize=1024)  # tables name the same few releases in every row
def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: ``(0, 25, 1)`` for ``0.25.1rc2+cu130``.

    Zeros at the end are left out. Raises UsageError if the text is no version.
    """
    match = re.match(_RELEASE, version.strip()) if len(version) <= LONGEST else None

    if match is None:
        raise UsageError(f"{version!r} is not a version", hint="write it as 0.33.0")

    without_zeros = re.sub(r"(\.0+)+$", "", match["release"])
    return tuple(map(int, without_zeros.split(".")))


def within(version: str, bounds: str) -> bool:
    """Return whether a version is in a range such as ``>=0.24,<0.33``. All versions are in ``""``.

    Raises UsageError if the text is no version, or a bound is malformed.
    """
    numbers = release(version)
    for bound in filter(str.strip, bounds.split(",")):
        match = re.fullmatch(_BOUND, bound)
        if match is None:
            what = f"{bound.strip()!r} is not a bound"
            raise UsageError(what, hint="write bounds as >=0.24,<0.33")

        compare = _COMPARISONS[match["sign"]]
        if not compare(numbers, release(match["release"])):
            return False

    return True


def check_range(text: str) -> None:
    """Raise UsageError if a text is no range of versions."""
    # Each bound is checked by itself, since within() stops at the first one that is not met.
    for bound in text.split(","):
        within("0", bound)


@frozen
class Lifetime:
    """A name, and the first and last release that have it.

    ``default`` is "" if the name has none. ``is_current`` says that the newest known release has
    the name; only ``Table.lifetime`` sets it.
    """

    name: str
    first: str
    last: str
    default: str
    is_current: bool = False

    def has(self, numbers: tuple[int, ...]) -> bool:
        """Return whether a release has the name; ``numbers`` is the result of ``release``."""
        return release(self.first) <= numbers <= release(self.last)


class Table:
    """The rows of a table.

    ``oldest`` and ``newest`` are the first and the last release in it: numbers, and a text.
    """

    def __init__(self, rows: list[Lifetime]) -> None:
        self.rows = rows

        # An index, since `check` looks up every name in a file.
        self._by_name: dict[str, list[Lifetime]] = {}
        self._edges: set[tuple[int, ...]] = set()
        for row in rows:
            self._by_name.setdefault(row.name, []).append(row)
            self._edges |= {release(row.first), release(row.last)}

        # A new table may have no rows.
        self.oldest = min(self._edges, default=release("0"))
        self.newest = max((row.last for row in rows), key=release, default="0")

    def at(self, version: str) -> Values:
        """Return name → default in a release; for "", the names of all releases.

        A release that the table does not have counts as the last one before it, and one that is
        older than the table as its first one.
        """
        rows = self.rows

        if version:
            numbers = release(version)
            earlier = [edge for edge in self._edges if edge <= numbers]

            # Older than the table counts as its first release.
            edge = max(earlier, default=self.oldest)
            rows = [row for row in rows if row.has(edge)]

        return {row.name: row.default for row in rows}

    def lifetime(self, name: str) -> Lifetime | None:
        """Return a name with its first and last release and its last default; None if unknown."""
        rows = self._by_name.get(name)
        if not rows:
            return None

        last = rows[-1]
        return replace(
            last,
            first=rows[0].first,
            is_current=last.last == self.newest,
        )


@cache
def read_env_data(name: str) -> Fields:
    """Return the contents of ``recipes/env/NAME.toml``. Raises UsageError if it is malformed."""
    return read_toml(Fields, _HOME / f"{name}.toml")


@cache
def read_table(*places: Path) -> Table:
    """Return the table of several files together."""
    rows = (row for place in places for row in read_tsv(place))
    return Table(
        [
            Lifetime(name=name, first=first, last=last, default=default)
            for name, first, last, default in rows
        ]
    )


def refusal(key: str, **fields: object) -> errors.PatchkitError:
    """Return the error that refusals.toml has for a key, with ``fields`` filled into its texts."""
    row = read_env_data("refusals")[key]
    kind: type[errors.PatchkitError] = getattr(errors, row["kind"])
    return kind(**fill_texts(row, fields))


@frozen
class OtherVariable:
    """A variable that neither vLLM nor NCCL defines.

    ``of`` is the project that reads it; ``versions`` is the range of that project's versions that
    do, "" for all.
    """

    of: str
    meaning: str
    versions: str = ""


def variable_table(reader: str) -> Table:
    """Return the variables of all known releases of ``vllm`` or ``nccl``."""
    older = [_HOME / "vllm_older.tsv"] if reader == "vllm" else []
    return read_table(*older, _HOME / f"{reader}_variables.tsv")


def vllm_variables(version: str, home: Path | None = None) -> Values:
    """Return name → default in a release; for "", the names of all releases.

    With ``home``, return the names in the vLLM in that folder, each with the default "".
    """
    if home:
        return dict.fromkeys(variable_readers(home / "envs.py"), "")

    return variable_table("vllm").at(version)


@cache
def nccl_variables(version: str) -> Values:
    """Return name → default in a release; for "", the names of all releases.

    A release later than the table counts as the newest one in it.
    """
    return variable_table("nccl").at(version)


@cache
def other_variables() -> Mapping[str, OtherVariable]:
    """Return the variables of Ray, torch, triton and other software that takes part in serving."""
    projects = read_toml(dict[str, dict[str, Values]], _HOME / "variables.toml")
    return {
        name: OtherVariable(of=project, **row)
        for project, variables in projects.items()
        for name, row in variables.items()
    }


def lifetime(name: str) -> Lifetime | None:
    """Return the first and the last release, of vLLM or else NCCL, that have a variable.

    Return None for another variable.
    """
    of_vllm = variable_table("vllm").lifetime(name)
    return of_vllm or variable_table("nccl").lifetime(name)
