"""Sign a wheelhouse and check signatures, by ssh-keygen with the keys that users have.

SHA256SUMS is what is signed: it has the digests of the wheels and of the other documents. Nothing
here is cryptography of our own: see ssh-keygen(1), ``-Y sign`` and ALLOWED SIGNERS.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import BusyError, HashMismatchError, HostError, SourceError, UsageError
from patchkit.process import Completed, attempt
from patchkit.wheel.wheelhouse.manifest import SUMS
from patchkit.wheel.wheelhouse.storage import (
    commit_files,
    open_for_reading,
    open_for_writing,
    read_own,
)
from patchkit.wheel.wheelhouse.verify import verify_wheelhouse

# ssh-keygen(1): a signature made for another purpose, such as a git commit, does not hold.
NAMESPACE = "patchkit"
SIGNATURE = f"{SUMS}.sig"
_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")  # below ~/.ssh, the first that is there
_SECONDS = 60.0  # for an answer where nobody can be asked
_SIGN = "sign where the wheelhouse is made: `patchkit wheelhouse sign`"


@dataclass(frozen=True, slots=True)
class Trust:
    """Whom a verifier believes: allowed signers and revoked keys, as files of ssh-keygen(1)."""

    signers: Path
    revoked: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """A signature that holds.

    ``signer`` is the principal of the allowed-signers file, "" where none was asked; ``key`` its
    SHA256 fingerprint.
    """

    key: str
    signer: str = ""


def sign_wheelhouse(house: Path, key: Path | None = None) -> Signed:
    """Sign a wheelhouse that is consistent in itself.

    ``key`` is a private key, or a public one whose private half an agent has. ssh-keygen asks for
    a passphrase or a touch on the terminal. Raises HashMismatchError for a wheelhouse that
    ``verify`` finds fault with, SourceError for one without wheels, UsageError without a key,
    HostError if ssh-keygen does not sign, BusyError if the wheelhouse changed meanwhile,
    StorageError.
    """
    chosen = _find_key(key)
    sums = read_own(house / SUMS)
    done = verify_wheelhouse(house)
    if found := done.findings:
        raise HashMismatchError(
            f"{house}: is not signed: {found[0].where} {found[0].what}",
            why="a signature vouches for a wheelhouse that verify finds nothing against",
            hint=found[0].hint,
        )
    if sums is None or not done.entries:
        raise SourceError(
            f"{house}: is not signed: it has no wheels that are listed",
            hint="build one first: patchkit build nccl; patchkit repack vllm==X",
        )
    made = _make_signature(sums, chosen)
    # Checked before it is kept: a signature that does not hold is worse than none.
    fingerprint = _read_fingerprint(sums, made)
    with open_for_writing(house):
        if read_own(house / SUMS) != sums:
            raise BusyError(f"{house}: changed while it was signed", hint="sign it again")
        commit_files(house, {SIGNATURE: made.decode("ascii")}, ())
    return Signed(key=fingerprint)


def check_signature(house: Path, trust: Trust) -> Signed:
    """Check that an allowed signer signed SHA256SUMS as it is.

    What that says of wheels and documents is for ``verify``. Raises HashMismatchError for a wrong,
    missing, foreign or stale signature, UsageError, HostError, StorageError, BusyError.
    """
    with open_for_reading(house):
        sums, made = _read_signed(house)
        key = _read_fingerprint(sums, made)
        return Signed(key=key, signer=_find_signer(sums, made, key, trust))


def _read_signed(house: Path) -> tuple[bytes, bytes]:
    """Return SHA256SUMS and its signature. Raises HashMismatchError if one is missing."""
    sums, made = (read_own(house / name) for name in (SUMS, SIGNATURE))
    if sums is None or made is None:
        raise HashMismatchError(
            f"{house / (SUMS if sums is None else SIGNATURE)}: is missing",
            why="nobody signed this wheelhouse, or the signature was not copied along",
            hint=_SIGN,
        )
    return sums, made


def _read_fingerprint(text: bytes, made: bytes) -> str:
    """Return which key made a signature. Raises HashMismatchError if it is none of this text."""
    with _signature_file(made) as file:
        done = _run_keygen("check-novalidate", "-n", NAMESPACE, "-s", file, text=text)
    if done.trouble:
        raise HashMismatchError(
            f"{SIGNATURE}: is not a signature of this {SUMS}",
            why=f"the wheelhouse was changed after it was signed, or somebody altered it: "
            f"{_error_words(done) or 'no signature'}",
            hint=_SIGN,
        )
    # Good "patchkit" signature with ED25519 key SHA256:…
    return done.output.split()[-1]


def _find_signer(text: bytes, made: bytes, key: str, trust: Trust) -> str:
    """Return the principal that the signature is accepted for. Raises HashMismatchError."""
    signers = ("-f", _require_readable(trust.signers))
    revoked = ("-r", _require_readable(trust.revoked)) if trust.revoked else ()
    with _signature_file(made) as file:
        done = _run_keygen("find-principals", *signers, "-s", file)
        words = [_error_words(done)]
        found = done.output.splitlines() if not done.trouble else []
        for principal in found:
            who = ("-I", principal, "-n", NAMESPACE)
            done = _run_keygen("verify", *signers, *who, *revoked, "-s", file, text=text)
            if not done.trouble:
                return principal
            words.append(_error_words(done))
    unsaid = f"{trust.revoked} revokes it" if found and revoked else "it is not listed there"
    raise HashMismatchError(
        f"{SIGNATURE}: was made with the key {key}, which {trust.signers} does not allow",
        why="; ".join(filter(None, words)) or unsaid,
        hint=f"ask who signed it; if that key is to be trusted, add it to {trust.signers}",
    )


def _find_key(chosen: Path | None) -> str:
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


def _require_readable(file: Path) -> str:
    """Return the absolute path of a file that can be read twice. Raises UsageError."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(file.stat().st_mode) and os.access(file, os.R_OK):
            return str(file.absolute())
    raise UsageError(
        f"{file}: no such file",
        why="allowed signers and revoked keys are files that can be read, no pipes",
        hint="name a file as in ssh-keygen(1), ALLOWED SIGNERS",
    )


def _make_signature(text: bytes, key: str) -> bytes:
    """Return the armored signature that ssh-keygen makes. Raises HostError."""
    with tempfile.TemporaryDirectory(prefix="patchkit-") as folder:
        place = Path(folder, SUMS)
        place.write_bytes(text)
        done = _run_keygen("sign", "-q", "-f", key, "-n", NAMESPACE, str(place), text=None)
        made = Path(folder, SIGNATURE)
        if not done.trouble and made.exists():
            return made.read_bytes()
    raise HostError(
        f"ssh-keygen did not sign with {key}",
        why=_error_words(done),
        hint="try it on a terminal, where a passphrase can be asked; a key of an agent is named "
        "by its .pub",
    )


@contextlib.contextmanager
def _signature_file(made: bytes) -> Iterator[str]:
    """Keep a signature in a private file while ssh-keygen reads it, more than once."""
    with tempfile.NamedTemporaryFile(prefix="patchkit-", suffix=".sig") as file:
        file.write(made)
        file.flush()
        yield file.name


def _run_keygen(verb: str, *arguments: str, text: bytes | None = b"") -> Completed:
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


def _error_words(done: Completed) -> str:
    """Return what ssh-keygen complains of, in one line."""
    lines = done.errors.splitlines()
    return "; ".join(line.strip() for line in lines if line.strip() != "No principal matched.")
