"""Signatures of a wheelhouse by the real ssh-keygen: which are accepted, which never."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patchkit.errors import HashMismatchError, HostError, SourceError, UsageError
from patchkit.wheel.wheelhouse.contents import add_wheel
from patchkit.wheel.wheelhouse.sign import Trust, check_signature, sign_wheelhouse
from support.wheels import write_wheel

SUMS, MANIFEST, LOCK = "SHA256SUMS", "manifest.json", "requirements.txt"
SIGNATURE = "SHA256SUMS.sig"
HOSTILE = "-n $(touch pwned) `x` 'é"


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """Nothing of the user's: no keys, no agent."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("SSH_AUTH_SOCK", "SSH_ASKPASS", "DISPLAY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def house(tmp_path):
    folder = tmp_path / "wheelhouse"
    add_wheel(folder, write_wheel(tmp_path / "made", "2.29.7+gb10.abc123"), {})
    return folder


@pytest.fixture
def listed(tmp_path, keys):
    """A file of allowed signers: ``listed("alice@example.org")``, with options, for a key."""

    def write(principal="alice@example.org", options="", key="alice", name="signers"):
        row = f"{principal} {options} {(keys / f'{key}.pub').read_text()}"
        (tmp_path / name).write_text(row)
        return tmp_path / name

    return write


def wheel_of(house):
    return next(house.glob("*.whl"))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_programs_of_others_can_check_it_by_hand(house, keys, listed, keygen):
    sign_wheelhouse(house, keys / "alice")

    ask = ["sha256sum", "--check", "--strict", SUMS]
    subprocess.run(ask, cwd=house, check=True, capture_output=True)
    rows = (house / SUMS).read_text().splitlines()
    assert [row.partition("  ")[2] for row in rows] == [MANIFEST, LOCK, wheel_of(house).name]
    who = ("-f", listed(), "-I", "alice@example.org", "-n", "patchkit")
    with (house / SUMS).open("rb") as text:
        said = keygen("-Y", "verify", *who, "-s", house / SIGNATURE, stdin=text)
    assert said.startswith('Good "patchkit" signature for alice@example.org')


def edited(name, old, new):
    def change(house):
        text = (house / name).read_text()
        assert old in text
        (house / name).write_text(text.replace(old, new))

    return change


def linked(name):
    def change(house):
        shutil.move(house / name, house.parent / "aside")
        (house / name).symlink_to(house.parent / "aside")

    return change


CHANGES = {
    "no sums": (lambda house: (house / SUMS).unlink(), f"{SUMS}: is missing"),
    "no signature": (lambda house: (house / SIGNATURE).unlink(), f"{SIGNATURE}: is missing"),
    "garbage": (lambda house: (house / SIGNATURE).write_bytes(b"\0" * 99), "missing header"),
    "empty": (lambda house: (house / SIGNATURE).write_bytes(b""), "is not a signature of"),
    "sums": (edited(SUMS, "gb10", "gb11"), "incorrect signature"),
    "linked signature": (linked(SIGNATURE), f"{SIGNATURE}: is a link"),
    "linked sums": (linked(SUMS), f"{SUMS}: is a link"),
    "a pipe": (
        lambda house: ((house / SIGNATURE).unlink(), os.mkfifo(house / SIGNATURE)),
        f"{SIGNATURE}: is a link, a folder or a device",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_is_refused(name, house, keys, listed):
    change, words = CHANGES[name]
    sign_wheelhouse(house, keys / "alice")
    check_signature(house, Trust(listed()))

    change(house)

    with pytest.raises(HashMismatchError) as caught:
        check_signature(house, Trust(listed()))
    assert words in str(caught.value)
    assert caught.value.why
    assert caught.value.hint


SIGNERS = {
    "foreign": ({"key": "mallory"}, "it is not listed there"),
    "expired": ({"options": 'valid-before="20200101"'}, "key has expired"),
    "too early": ({"options": 'valid-after="20990101"'}, "key is not yet valid"),
    "for git": (
        {"options": 'namespaces="git"'},
        'not permitted for use in signature namespace "pa',
    ),
    "an authority": ({"options": "cert-authority"}, "it is not listed there"),
    "unknown option": ({"options": "trust-me"}, "unknown key option"),
    "comment": ({"principal": "#alice"}, "it is not listed there"),
}


@pytest.mark.parametrize("name", SIGNERS)
def test_signers_that_do_not_count(name, house, keys, listed):
    how, words = SIGNERS[name]
    key = sign_wheelhouse(house, keys / "alice").key

    with pytest.raises(HashMismatchError, match="does not allow") as caught:
        check_signature(house, Trust(listed(**how)))

    assert words in caught.value.why
    assert key in caught.value.what


def test_a_revoked_key(house, keys, listed, keygen):
    sign_wheelhouse(house, keys / "alice")
    revoked = keys.parent / "revoked"
    keygen("-k", "-f", revoked, keys / "mallory.pub")
    assert check_signature(house, Trust(listed(), revoked)).signer == "alice@example.org"
    keygen("-k", "-u", "-f", revoked, keys / "alice.pub")
    with pytest.raises(HashMismatchError, match="does not allow") as caught:
        check_signature(house, Trust(listed(), revoked))
    assert caught.value.why == f"{revoked} revokes it"


def test_hostile_names_are_names(tmp_path, keys, listed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    key = tmp_path / "-f $(touch pwned)"
    add_wheel(tmp_path / HOSTILE, write_wheel(tmp_path / "made", "2.29.7+gb10.abc123"), {})
    shutil.copy(keys / "alice", key)
    sign_wheelhouse(Path(HOSTILE), Path(key.name))
    for principal in ("-O", "$(touch", "-r x $(touch pwned)"):
        file = listed(f'"{principal}"', name="--signers $(touch pwned) 'é")
        assert check_signature(Path(HOSTILE), Trust(Path(file.name))).signer == principal
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("file", ["nothing", "folder", "pipe"])
def test_signers_that_cannot_be_read(file, house, keys, tmp_path):
    sign_wheelhouse(house, keys / "alice")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match=f"{file}: no such file"):
        check_signature(house, Trust(tmp_path / file))


def test_what_verify_finds_fault_with_is_not_signed(house, keys):
    wheel_of(house).write_bytes(b"other")
    before = contents(house)
    with pytest.raises(HashMismatchError, match=r"is not signed: .* has 5 bytes"):
        sign_wheelhouse(house, keys / "alice")
    assert contents(house) == before


def test_where_there_is_nothing_to_sign(keys, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="no wheels that are listed"):
        sign_wheelhouse(tmp_path / "empty", keys / "alice")
    with pytest.raises(UsageError, match="no such folder"):
        sign_wheelhouse(tmp_path / "none", keys / "alice")
    assert contents(tmp_path / "empty") == {}


def test_keys_that_are_taken(house, keys, keygen, tmp_path):
    with pytest.raises(UsageError, match=r"home/\.ssh: has none of id_ed25519, id_ecdsa, id_rsa"):
        sign_wheelhouse(house)
    with pytest.raises(UsageError, match="nobody: no such key"):
        sign_wheelhouse(house, tmp_path / "nobody")
    own = tmp_path / "home/.ssh"
    own.mkdir(parents=True)
    keygen("-q", "-t", "ecdsa", "-N", "", "-f", own / "id_ecdsa")
    assert sign_wheelhouse(house).key == keygen("-lf", own / "id_ecdsa.pub").split()[1]
    shutil.copy(keys / "alice", own / "id_ed25519")
    assert sign_wheelhouse(house).key == keygen("-lf", keys / "alice.pub").split()[1]
    before = contents(house)
    with pytest.raises(HostError, match=r"did not sign with .*wheelhouse/manifest\.json"):
        sign_wheelhouse(house, house / MANIFEST)
    assert contents(house) == before


# Run the rest of the arguments with standard input as the terminal of a session of its own.
ON_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
ON_TERMINAL += "os.execv(sys.argv[1], sys.argv[1:])"


@pytest.mark.parametrize(("typed", "rc"), [("open sesame", 0), ("wrong", 9)])
def test_a_passphrase_is_asked_on_the_terminal(typed, rc, house, keygen, environment, tmp_path):
    key = tmp_path / "key"
    keygen("-q", "-t", "ed25519", "-N", "open sesame", "-f", key)
    command = ["patchkit", "wheelhouse", "sign", "--dir", str(house), "--key", str(key)]
    ours, theirs = pty.openpty()
    started = subprocess.Popen(
        [sys.executable, "-c", ON_TERMINAL, sys.executable, "-m", *command],
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    said, answered = b"", False
    with contextlib.suppress(OSError):  # how Linux ends what a terminal says
        # Whoever says nothing for a minute waits for something else: closing hangs up on it.
        while select.select([ours], [], [], 60)[0] and (part := os.read(ours, 4096)):
            said += part
            if b"assphrase" in said and said.endswith(b": ") and not answered:
                answered = os.write(ours, f"{typed}\n".encode()) > 0
    os.close(ours)
    assert started.wait() == rc, said.decode()
    assert answered
    assert typed.encode() not in said
    assert (house / SIGNATURE).exists() == (rc == 0)


def test_without_ssh_keygen(house, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "key").write_text("")
    with pytest.raises(HostError, match="ssh-keygen is not installed") as caught:
        sign_wheelhouse(house, tmp_path / "key")
    assert "openssh-client" in caught.value.hint


def test_the_command_line(cli, house, keys, listed):
    plain = cli("verify", house).stdout
    said = "consistent in itself; only a signature says who made it"
    command = rf"`\S*python\S* -m patchkit verify {house} --signers FILE`\n"
    assert re.search(f"note {said}: {command}", plain)
    words = ("wheelhouse", "sign", "--key", keys / "alice", "--dir", house)
    key = json.loads(cli(*words, "--json").stdout)["key"]
    assert f"signed with the key {key}" in cli(*words).stdout
    shown = cli("verify", house, "--signers", listed()).stdout
    assert f"signed by alice@example.org, key {key}" in shown
    assert "note" not in shown
    found = json.loads(cli("verify", house, "--signers", listed(), "--json").stdout)
    assert found["signature"] == {"signer": "alice@example.org", "key": key}
    assert cli("verify", house, "--revoked", "x", rc=2).stdout == ""


@pytest.mark.parametrize("name", [MANIFEST, LOCK, "wheel"])
def test_what_changed_below_a_good_signature_is_found(name, cli, house, keys, listed):
    sign_wheelhouse(house, keys / "alice")
    place = wheel_of(house) if name == "wheel" else house / name
    place.write_bytes(place.read_bytes().replace(b"2.29.7", b"2.29.8") + b"\n")
    said = cli("verify", house, "--signers", listed(), rc=8)
    assert place.name in said.stdout + said.stderr


def test_a_consistent_forgery_is_seen_by_its_signature_alone(cli, house, keys, listed, tmp_path):
    sign_wheelhouse(house, keys / "alice")
    forged = write_wheel(tmp_path / "forged", "2.29.7+gb10.abc123", files={"evil": b"1"})
    add_wheel(house, forged, {})
    assert "consistent in itself" in cli("verify", house).stdout
    done = cli("verify", house, "--signers", listed(), rc=8)
    assert f"{SIGNATURE}: is not a signature of this {SUMS}" in done.stderr
    # Nor does it help to sign it with a key of one's own.
    sign_wheelhouse(house, keys / "mallory")
    assert "does not allow" in cli("verify", house, "--signers", listed(), rc=8).stderr
    # Who made the change signs it again.
    sign_wheelhouse(house, keys / "alice")
    assert check_signature(house, Trust(listed())).signer == "alice@example.org"
