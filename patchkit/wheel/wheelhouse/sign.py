"""Sign a wheelhouse and check signatures, by ssh-keygen with the keys that users have.

Nothing here is cryptography of our own: see ssh-keygen(1), ``-Y sign`` and ALLOWED SIGNERS.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import BusyError, HashMismatchError, HostError, SourceError, UsageError
from patchkit.process import Completed, attempt
from patchkit.wheel.wheelhouse.accepted import Seen, last_seen, remember, require_no_older
from patchkit.wheel.wheelhouse.own_files import read_own
from patchkit.wheel.wheelhouse.statement import (
    STATEMENT,
    Statement,
    digests,
    read_statement,
    require_newer,
    signing_date,
)
from patchkit.wheel.wheelhouse.storage import commit, reading, writing
from patchkit.wheel.wheelhouse.verify import verify

# ssh-keygen(1): a signature made for another purpose, such as a git commit, does not hold.
NAMESPACE = "patchkit"
SIGNATURE = f"{STATEMENT}.sig"
_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")  # below ~/.ssh, the first that is there
_SECONDS = 60.0  # for an answer where nobody can be asked
_ANEW = f"; to begin anew there, remove {STATEMENT} and {SIGNATURE} first"


@dataclass(frozen=True, slots=True)
class Trust:
    """Whom a verifier believes: allowed signers, revoked keys, and a state that is too old."""

    signers: Path
    revoked: Path | None = None
    newer_than: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """A statement whose signature holds.

    ``signer`` is the principal of the allowed-signers file, "" where none was asked; ``key`` its
    SHA256 fingerprint. ``seen`` is what was accepted here before; ``stale`` names the documents
    that were changed since, which only ``signature`` lets pass.
    """

    statement: Statement
    key: str
    signer: str = ""
    seen: Seen | None = None
    stale: tuple[str, ...] = ()

    def fields(self) -> dict[str, object]:
        return {
            **self.statement.fields(),
            "signer": self.signer or None,
            "key": self.key,
            "seen": self.seen.counter if self.seen else None,
            "stale": list(self.stale),
        }


def sign(house: Path, key: Path | None = None) -> Signed:
    """Sign a wheelhouse that is consistent in itself; the counter is one more than the last.

    ``key`` is a private key, or a public one whose private half an agent has. ssh-keygen asks for
    a passphrase or a touch on the terminal. Raises HashMismatchError for a wheelhouse that
    ``verify`` finds fault with, SourceError for one without wheels, UsageError without a key,
    HostError if ssh-keygen does not sign, BusyError if the wheelhouse changed meanwhile,
    StorageError.
    """
    chosen = _key(key)
    sums = digests(house)
    if found := verify(house).findings:
        raise HashMismatchError(
            f"{house}: is not signed: {found[0].where} {found[0].what}",
            why="a signature vouches for a wheelhouse that verify finds nothing against",
            hint=found[0].hint,
        )
    if not all(sums.values()):
        raise SourceError(
            f"{house}: is not signed: it has no wheels that are listed",
            hint="build one first: patchkit build nccl; patchkit repack vllm==X",
        )
    former = signature(house)
    old = former.statement if former else None
    seen = last_seen(old.wheelhouse) if old else None
    statement = Statement(
        wheelhouse=old.wheelhouse if old else secrets.token_hex(8),
        # This machine's memory counts too: signing an older copy must not use a counter twice.
        counter=1 + max(old.counter if old else 0, seen.counter if seen else 0),
        date=signing_date(),
        sums=sums,
    )
    made = _signed(statement.text, chosen)
    # Checked before it is kept: a signature that does not hold is worse than none.
    fingerprint = _fingerprint(statement.text.encode(), made)
    with writing(house):
        if digests(house) != sums:
            raise BusyError(f"{house}: changed while it was signed", hint="sign it again")
        commit(house, {STATEMENT: statement.text, SIGNATURE: made.decode("ascii")}, ())
    remember(statement)
    return Signed(statement=statement, key=fingerprint, seen=seen)


def signature(house: Path) -> Signed | None:
    """Return what a wheelhouse says of its signature, None if it has none.

    That the key belongs to anyone in particular is not asked. Raises HashMismatchError if the
    signature is not one of this statement, HostError without ssh-keygen, StorageError.
    """
    with reading(house):
        if not any(os.path.lexists(house / name) for name in (STATEMENT, SIGNATURE)):
            return None
        text, made = _both(house)
        key, statement = _fingerprint(text, made), read_statement(text)
        return Signed(statement=statement, key=key, stale=tuple(statement.changed(house)))


def check(house: Path, trust: Trust) -> Signed:
    """Check that an allowed signer signed the documents of a wheelhouse as they are.

    What the documents say of the wheels is for ``verify``; after it ``remember`` the statement.
    Raises HashMismatchError for a wrong, missing, foreign or stale signature and for a state older
    than one that was accepted here; UsageError, HostError, StorageError, BusyError.
    """
    with reading(house):
        text, made = _both(house)
        key = _fingerprint(text, made)
        signer = _signer(text, made, key, trust)
        statement = read_statement(text)
        if stale := statement.changed(house):
            raise HashMismatchError(
                f"{house / stale[0]}: was changed after {signer} signed it on {statement.date}",
                why="wheels were added or removed since, or somebody altered it",
                hint="sign again where the wheelhouse is made: patchkit wheelhouse sign",
            )
    if trust.newer_than is not None:
        require_newer(statement, trust.newer_than)
    seen = last_seen(statement.wheelhouse)
    require_no_older(statement, seen)
    return Signed(statement=statement, key=key, signer=signer, seen=seen)


def _both(house: Path) -> tuple[bytes, bytes]:
    """Return statement and signature. Raises HashMismatchError if one is missing."""
    text, made = (read_own(house / name) for name in (STATEMENT, SIGNATURE))
    if text is None or made is None:
        raise HashMismatchError(
            f"{house / (STATEMENT if text is None else SIGNATURE)}: is missing",
            why="nobody signed this wheelhouse, or the signature was not copied along",
            hint=f"on the machine where it is made: `patchkit wheelhouse sign`{_ANEW}",
        )
    return text, made


def _fingerprint(text: bytes, made: bytes) -> str:
    """Return which key made a signature. Raises HashMismatchError if it is none of this text."""
    with _beside(made) as file:
        done = _keygen("check-novalidate", "-n", NAMESPACE, "-s", file, text=text)
    if done.trouble:
        raise HashMismatchError(
            f"{SIGNATURE}: is not a signature of {STATEMENT}",
            why=_words(done) or "one of the two was changed",
            hint=f"get both again from where they were signed{_ANEW}",
        )
    # Good "patchkit" signature with ED25519 key SHA256:…
    return done.output.split()[-1]


def _signer(text: bytes, made: bytes, key: str, trust: Trust) -> str:
    """Return the principal that the signature is accepted for. Raises HashMismatchError."""
    signers = ("-f", _readable(trust.signers))
    revoked = ("-r", _readable(trust.revoked)) if trust.revoked else ()
    with _beside(made) as file:
        done = _keygen("find-principals", *signers, "-s", file)
        words = [_words(done)]
        found = done.output.splitlines() if not done.trouble else []
        for principal in found:
            who = ("-I", principal, "-n", NAMESPACE)
            done = _keygen("verify", *signers, *who, *revoked, "-s", file, text=text)
            if not done.trouble:
                return principal
            words.append(_words(done))
    unsaid = f"{trust.revoked} revokes it" if found and revoked else "it is not listed there"
    raise HashMismatchError(
        f"{SIGNATURE}: was made with the key {key}, which {trust.signers} does not allow",
        why="; ".join(filter(None, words)) or unsaid,
        hint=f"ask who signed it; if that key is to be trusted, add it to {trust.signers}",
    )


def _key(chosen: Path | None) -> str:
    home = Path.home() / ".ssh"
    candidates = [chosen] if chosen else [home / f"{n}{end}" for n in _KEYS for end in ("", ".pub")]
    for candidate in candidates:
        if candidate.is_file():
            return str(candidate.absolute())
    raise UsageError(
        f"{chosen}: no such key" if chosen else f"{home}: has none of {', '.join(_KEYS)}",
        hint="name one with --key, a public one if an agent has it; or make one: "
        "ssh-keygen -t ed25519",
    )


def _readable(file: Path) -> str:
    """Return the absolute path of a file that can be read twice. Raises UsageError."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(file.stat().st_mode) and os.access(file, os.R_OK):
            return str(file.absolute())
    raise UsageError(
        f"{file}: no such file",
        why="allowed signers and revoked keys are files that can be read, no pipes",
        hint="name a file as in ssh-keygen(1), ALLOWED SIGNERS",
    )


def _signed(text: str, key: str) -> bytes:
    """Return the armored signature that ssh-keygen makes. Raises HostError."""
    with tempfile.TemporaryDirectory(prefix="patchkit-") as folder:
        place = Path(folder, STATEMENT)
        place.write_text(text, encoding="ascii")
        done = _keygen("sign", "-q", "-f", key, "-n", NAMESPACE, str(place), text=None)
        made = Path(folder, SIGNATURE)
        if not done.trouble and made.exists():
            return made.read_bytes()
    raise HostError(
        f"ssh-keygen did not sign with {key}",
        why=_words(done),
        hint="try it on a terminal, where a passphrase can be asked; a key of an agent is named "
        "by its .pub",
    )


@contextlib.contextmanager
def _beside(made: bytes) -> Iterator[str]:
    """Keep a signature in a private file while ssh-keygen reads it, more than once."""
    with tempfile.NamedTemporaryFile(prefix="patchkit-", suffix=".sig") as file:
        file.write(made)
        file.flush()
        yield file.name


def _keygen(verb: str, *arguments: str, text: bytes | None = b"") -> Completed:
    """Run ``ssh-keygen -Y`` with ``text`` on its standard input.

    With None it has patchkit's own: on a terminal it asks there, and takes its time. Raises
    HostError if it is not installed or does not answer.
    """
    asks = text is None
    done = attempt(
        *("ssh-keygen", "-Y", verb, *arguments),
        input=text or b"",
        terminal=asks,
        timeout=None if asks and os.isatty(0) else _SECONDS,
    )
    if done.status is None:
        raise done.error(
            why="it waits for an agent, or for somebody to touch the key"
            if done.started
            else "it signs and checks with the keys that users have",
            hint="run it on a terminal" if done.started else "sudo apt-get install openssh-client",
        )
    return done


def _words(done: Completed) -> str:
    """Return what ssh-keygen complains of, in one line."""
    lines = done.errors.splitlines()
    return "; ".join(line.strip() for line in lines if line.strip() != "No principal matched.")
