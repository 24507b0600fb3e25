"""Remember which signed wheelhouses were accepted on this machine, as known_hosts does for ssh.

Each line of ``known_wheelhouses`` has: wheelhouse, counter, date of signing, date of acceptance,
sha256 of SHA256SUMS.signed. There is one line for each wheelhouse, whoever signed it: a signer who
leaves takes no memory along.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from patchkit.durable.atomic import replacing
from patchkit.durable.failure import translated
from patchkit.errors import HashMismatchError, StorageError
from patchkit.quoting import quoted
from patchkit.wheel.wheelhouse.statement import STATEMENT, Statement, utc
from patchkit.wheel.wheelhouse.storage import held

_WHEN = r"[0-9T:Z-]{20}"
_LINE = re.compile(rf"([0-9a-f]{{16}}) ([1-9][0-9]{{0,8}}) ({_WHEN}) ({_WHEN}) ([0-9a-f]{{64}})")


@dataclass(frozen=True, slots=True)
class Seen:
    """The newest statement about a wheelhouse that was accepted here, and when that was."""

    wheelhouse: str
    counter: int
    date: str
    accepted: str
    sha256: str

    @property
    def line(self) -> str:
        return f"{self.wheelhouse} {self.counter} {self.date} {self.accepted} {self.sha256}\n"


def memory() -> Path:
    """Return the path of the file: below $XDG_STATE_HOME, by default ~/.local/state."""
    return platformdirs.user_state_path("patchkit") / "known_wheelhouses"


def last_seen(wheelhouse: str) -> Seen | None:
    """Return what was accepted of a wheelhouse. Raises StorageError if the file is unreadable."""
    return _read(memory()).get(wheelhouse)


def require_no_older(statement: Statement, seen: Seen | None) -> None:
    """Raise HashMismatchError if a later statement, or another one of that counter, was seen."""
    if seen is None or statement.counter > seen.counter or statement.sha256 == seen.sha256:
        return
    older = statement.counter < seen.counter
    raise HashMismatchError(
        f"{STATEMENT}: has counter {statement.counter} of {statement.date}; counter "
        f"{seen.counter} of {seen.date} was accepted here on {seen.accepted}",
        why="this is an older state of the wheelhouse"
        if older
        else "two different states were signed with one counter",
        hint="get the newer one from where it is signed"
        if older
        else "sign again where the newest state is",
    )


def remember(statement: Statement) -> None:
    """Keep the statement as the newest of its wheelhouse. Raises StorageError, BusyError."""
    place = memory()
    with translated(f"{STATEMENT} cannot be remembered"):
        place.parent.mkdir(parents=True, exist_ok=True)
        with held(place.parent):
            known = _read(place)
            seen = known.get(statement.wheelhouse)
            # Another process may have remembered a newer one since it was looked up.
            if seen and seen.counter >= statement.counter:
                return
            now = utc(time.time())
            known[statement.wheelhouse] = Seen(
                statement.wheelhouse, statement.counter, statement.date, now, statement.sha256
            )
            with replacing(place, private=True) as file:
                file.writelines(line.line.encode("ascii") for line in known.values())


def _read(place: Path) -> dict[str, Seen]:
    try:
        lines = place.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(place, str(error)) from None
    found = {}
    for number, line in enumerate(lines, 1):
        if not (match := _LINE.fullmatch(line)):
            raise _unreadable(place, f"line {number} is damaged")
        wheelhouse, counter, *rest = match.groups()
        found[wheelhouse] = Seen(wheelhouse, int(counter), *rest)
    return found


def _unreadable(place: Path, why: str) -> StorageError:
    aside = quoted("mv", place, f"{place}.damaged")
    return StorageError(
        f"{place}: cannot be read, so an older wheelhouse would not be noticed",
        why=why,
        hint=f"mend it, or begin anew: {aside}",
    )
