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

from patchkit.errors import HashMismatchError, HostError, SourceError, StorageError, UsageError
from patchkit.wheel.wheelhouse.accepted import memory, remember
from patchkit.wheel.wheelhouse.contents import add
from patchkit.wheel.wheelhouse.prune import prune
from patchkit.wheel.wheelhouse.sign import Trust, check, sign, signature
from patchkit.wheel.wheelhouse.statement import Statement
from support.wheels import write_wheel

SUMS, MANIFEST, LOCK = "SHA256SUMS", "manifest.json", "requirements.txt"
STATEMENT, SIGNATURE = "SHA256SUMS.signed", "SHA256SUMS.signed.sig"
HOSTILE = "-n $(touch pwned) `x` 'é"


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """Nothing of the user's: no keys, no agent, no memory of wheelhouses."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("SSH_AUTH_SOCK", "SSH_ASKPASS", "DISPLAY", "SOURCE_DATE_EPOCH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def house(tmp_path):
    folder = tmp_path / "wheelhouse"
    add(folder, write_wheel(tmp_path / "made", "2.29.7+gb10.abc123"), {})
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
    sign(house, keys / "alice")

    ask = ["sha256sum", "--check", "--strict"]
    for file in (STATEMENT, SUMS):
        subprocess.run([*ask, file], cwd=house, check=True, capture_output=True)
    rows = (house / STATEMENT).read_text().splitlines()
    assert [row.partition("  ")[2] for row in rows[4:]] == [SUMS, MANIFEST, LOCK]
    who = ("-f", listed(), "-I", "alice@example.org", "-n", "patchkit")
    with (house / STATEMENT).open("rb") as text:
        said = keygen("-Y", "verify", *who, "-s", house / SIGNATURE, stdin=text)
    assert said.startswith('Good "patchkit" signature for alice@example.org')


def test_who_signed_and_when(house, keys, listed, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    made = sign(house, keys / "alice")
    monkeypatch.setenv("XDG_STATE_HOME", str(house.parent / "elsewhere"))

    found = check(house, Trust(listed()))

    assert (found.signer, found.statement) == ("alice@example.org", made.statement)
    assert (found.statement.counter, found.statement.date) == (1, "2023-11-14T22:13:20Z")
    assert re.fullmatch(r"SHA256:[\w+/]{43}", found.key)
    assert found.seen is None
    remember(found.statement)
    assert check(house, Trust(listed())).seen.counter == 1


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
    "no statement": (lambda house: (house / STATEMENT).unlink(), f"{STATEMENT}: is missing"),
    "no signature": (lambda house: (house / SIGNATURE).unlink(), f"{SIGNATURE}: is missing"),
    "garbage": (lambda house: (house / SIGNATURE).write_bytes(b"\0" * 99), "missing header"),
    "empty": (lambda house: (house / SIGNATURE).write_bytes(b""), "is not a signature of"),
    "counter": (edited(STATEMENT, "counter: 1", "counter: 9"), "incorrect signature"),
    "date": (edited(STATEMENT, "# date: 2", "# date: 3"), "incorrect signature"),
    "digest": (edited(STATEMENT, f"  {MANIFEST}", f" *{MANIFEST}"), "incorrect signature"),
    "sums": (edited(SUMS, "gb10", "gb11"), f"{SUMS}: was changed after alice@example.org"),
    "lock": (edited(LOCK, "gb10", "gb11"), f"{LOCK}: was changed after alice@example.org"),
    "manifest": (lambda house: (house / MANIFEST).unlink(), f"{MANIFEST}: was changed after"),
    "linked statement": (linked(STATEMENT), f"{STATEMENT}: is a link"),
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
    sign(house, keys / "alice")
    check(house, Trust(listed()))

    change(house)

    with pytest.raises(HashMismatchError) as caught:
        check(house, Trust(listed()))
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
    key = sign(house, keys / "alice").key

    with pytest.raises(HashMismatchError, match="does not allow") as caught:
        check(house, Trust(listed(**how)))

    assert words in caught.value.why
    assert key in caught.value.what


def test_options_that_allow_it(house, keys, listed):
    sign(house, keys / "alice")
    both = 'namespaces="git,patchkit",valid-after="20200101"'
    assert check(house, Trust(listed("*@example.org,bob", both))).signer == "*@example.org"
    # A line that has expired does not stand in the way of the next one.
    signers = listed("alice", 'valid-before="20200101"')
    signers.write_text(signers.read_text() + listed("bob", name="more").read_text())
    assert check(house, Trust(signers)).signer == "bob"


def test_a_revoked_key(house, keys, listed, keygen):
    sign(house, keys / "alice")
    revoked = keys.parent / "revoked"
    keygen("-k", "-f", revoked, keys / "mallory.pub")
    assert check(house, Trust(listed(), revoked)).signer == "alice@example.org"
    keygen("-k", "-u", "-f", revoked, keys / "alice.pub")
    with pytest.raises(HashMismatchError, match="does not allow") as caught:
        check(house, Trust(listed(), revoked))
    assert caught.value.why == f"{revoked} revokes it"


def test_a_signature_for_something_else(house, keys, listed, keygen):
    sign(house, keys / "alice")
    (house / SIGNATURE).unlink()
    keygen("-Y", "sign", "-f", keys / "alice", "-n", "file", house / STATEMENT)
    with pytest.raises(HashMismatchError, match="is not a signature of") as caught:
        check(house, Trust(listed()))
    assert "namespace does not match" in caught.value.why


def test_signed_text_of_another_kind(house, keys, listed, keygen):
    for file in (STATEMENT, SIGNATURE):
        (house / file).unlink(missing_ok=True)
    shutil.copy(house / SUMS, house / STATEMENT)
    keygen("-Y", "sign", "-f", keys / "alice", "-n", "patchkit", house / STATEMENT)
    with pytest.raises(HashMismatchError, match="is not what patchkit signs"):
        check(house, Trust(listed()))


def test_an_older_state_is_noticed_wherever_it_lies(house, keys, listed, tmp_path):
    sign(house, keys / "alice")
    shutil.copytree(house, tmp_path / "older")
    shutil.copytree(house, tmp_path / "fork")
    new = sign(house, keys / "alice")
    assert new.statement.counter == 2
    trust = Trust(listed())
    remember(check(house, trust).statement)

    with pytest.raises(HashMismatchError) as caught:
        check(tmp_path / "older", trust)

    assert re.search(
        r"has counter 1 of \S+Z; counter 2 of \S+Z was accepted here on \S+Z", caught.value.what
    )
    assert check(house, trust).seen.counter == 2
    # Another machine signs the old state again: the same counter for two states.
    kept = memory().read_text()
    memory().unlink()
    add(tmp_path / "fork", write_wheel(tmp_path / "made", "1.0", project="other"), {})
    assert sign(tmp_path / "fork", keys / "alice").statement.counter == 2
    memory().write_text(kept)
    with pytest.raises(HashMismatchError, match=r"counter 2 of .* was accepted") as caught:
        check(tmp_path / "fork", trust)
    assert caught.value.why == "two different states were signed with one counter"


def test_a_signer_who_leaves_takes_no_memory_along(house, keys, listed, tmp_path):
    sign(house, keys / "alice")
    shutil.copytree(house, tmp_path / "older")
    sign(house, keys / "mallory")
    signers = listed()
    signers.write_text(signers.read_text() + listed("new", key="mallory", name="n").read_text())
    assert check(house, Trust(signers)).signer == "new"
    with pytest.raises(HashMismatchError, match=r"counter 1 of .* counter 2 of"):
        check(tmp_path / "older", Trust(signers))


def test_the_counter_goes_on_after_what_was_seen_here(house, keys):
    first = sign(house, keys / "alice").statement
    remember(Statement(**{**_fields(first), "counter": 7}))
    assert sign(house, keys / "alice").statement.counter == 8


def _fields(statement):
    return {name: getattr(statement, name) for name in ("wheelhouse", "counter", "date", "sums")}


@pytest.mark.parametrize(
    ("limit", "newer"),
    [
        *(("0", True), ("1", False), ("9" * 30, False), ("2023-11-14", True)),
        *(("2023-11-15", False), ("2023-11-14T23:13:19+01:00", True)),
        *(("2023-11-14T22:13:20", False), ("2023-11-14T22:13:19", True)),
    ],
)
def test_newer_than(limit, newer, house, keys, listed, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")  # 2023-11-14T22:13:20Z
    sign(house, keys / "alice")
    if newer:
        assert check(house, Trust(listed(), newer_than=limit)).statement.counter == 1
    else:
        with pytest.raises(HashMismatchError, match=f"which is not newer than {re.escape(limit)}"):
            check(house, Trust(listed(), newer_than=limit))


def test_newer_than_something_else(house, keys, listed):
    sign(house, keys / "alice")
    for limit in ("", "yesterday", "-1", "٣", "2023-13-01", "0001-01-01T00:00:00+14:00"):
        with pytest.raises(UsageError, match="takes a counter or a date"):
            check(house, Trust(listed(), newer_than=limit))


def test_hostile_names_are_names(tmp_path, keys, listed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    key = tmp_path / "-f $(touch pwned)"
    add(tmp_path / HOSTILE, write_wheel(tmp_path / "made", "2.29.7+gb10.abc123"), {})
    shutil.copy(keys / "alice", key)
    sign(Path(HOSTILE), Path(key.name))
    for principal in ("-O", "$(touch", "-r x $(touch pwned)"):
        file = listed(f'"{principal}"', name="--signers $(touch pwned) 'é")
        assert check(Path(HOSTILE), Trust(Path(file.name))).signer == principal
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("file", ["nothing", "folder", "pipe"])
def test_signers_that_cannot_be_read(file, house, keys, tmp_path):
    sign(house, keys / "alice")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match=f"{file}: no such file"):
        check(house, Trust(tmp_path / file))


def test_what_verify_finds_fault_with_is_not_signed(house, keys):
    wheel_of(house).write_bytes(b"other")
    before = contents(house)
    with pytest.raises(HashMismatchError, match=r"is not signed: .* has 5 bytes"):
        sign(house, keys / "alice")
    assert contents(house) == before


def test_where_there_is_nothing_to_sign(keys, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="no wheels that are listed"):
        sign(tmp_path / "empty", keys / "alice")
    with pytest.raises(UsageError, match="no such folder"):
        sign(tmp_path / "none", keys / "alice")
    assert contents(tmp_path / "empty") == {}


def test_a_damaged_statement_is_not_signed_over(house, keys):
    sign(house, keys / "alice")
    edited(STATEMENT, "counter: 1", "counter: 8")(house)
    before = contents(house)
    with pytest.raises(HashMismatchError, match="is not a signature of") as caught:
        sign(house, keys / "alice")
    assert contents(house) == before
    assert f"to begin anew there, remove {STATEMENT} and {SIGNATURE} first" in caught.value.hint
    for file in (STATEMENT, SIGNATURE):
        (house / file).unlink()
    assert sign(house, keys / "alice").statement.counter == 1


def test_a_changed_wheelhouse_keeps_a_stale_signature_and_says_so(house, keys, listed, tmp_path):
    first = sign(house, keys / "alice")
    assert signature(house).stale == ()

    add(house, write_wheel(tmp_path / "made", "1.0", project="other"), {})
    prune(house)

    found = signature(house)
    assert (found.key, found.statement) == (first.key, first.statement)
    assert found.stale == (SUMS, MANIFEST, LOCK)
    with pytest.raises(HashMismatchError, match="was changed after"):
        check(house, Trust(listed()))
    again = sign(house, keys / "alice").statement
    assert (again.wheelhouse, again.counter) == (first.statement.wheelhouse, 2)
    assert check(house, Trust(listed())).statement == again


def test_keys_that_are_taken(house, keys, keygen, tmp_path):
    with pytest.raises(UsageError, match=r"home/\.ssh: has none of id_ed25519, id_ecdsa, id_rsa"):
        sign(house)
    with pytest.raises(UsageError, match="nobody: no such key"):
        sign(house, tmp_path / "nobody")
    own = tmp_path / "home/.ssh"
    own.mkdir(parents=True)
    keygen("-q", "-t", "ecdsa", "-N", "", "-f", own / "id_ecdsa")
    assert sign(house).key == keygen("-lf", own / "id_ecdsa.pub").split()[1]
    shutil.copy(keys / "alice", own / "id_ed25519")
    assert sign(house).key == keygen("-lf", keys / "alice.pub").split()[1]
    before = contents(house)
    with pytest.raises(HostError, match=r"did not sign with .*wheelhouse/manifest\.json"):
        sign(house, house / MANIFEST)
    assert contents(house) == before


def test_a_key_that_only_an_agent_has(house, keys, tmp_path, monkeypatch):
    if not (shutil.which("ssh-agent") and shutil.which("ssh-add")):
        pytest.skip("ssh-agent is not installed (Debian: openssh-client)")
    public = shutil.copy(keys / "alice.pub", tmp_path / "agents.pub")
    with pytest.raises(HostError, match="did not sign") as caught:
        sign(house, tmp_path / "agents.pub")
    assert "No private key found" in caught.value.why
    # Sockets have short names; pytest's folders have not.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SSH_AUTH_SOCK", "agent")
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", "agent"], stdout=subprocess.PIPE)
    try:
        agent.stdout.readline()
        subprocess.run(["ssh-add", "-q", keys / "alice"], check=True)
        assert sign(house, tmp_path / public).statement.counter == 1
    finally:
        agent.terminate()
        agent.communicate()


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
        sign(house, tmp_path / "key")
    assert "openssh-client" in caught.value.hint


def test_the_memory_is_a_file_that_people_can_mend(house, keys, listed, monkeypatch):
    sign(house, keys / "alice")
    known = memory().read_text()
    memory().write_text(f"{known}garbage\n")
    with pytest.raises(StorageError, match="line 2 is damaged") as caught:
        check(house, Trust(listed()))
    assert caught.value.hint == f"mend it, or begin anew: mv {memory()} {memory()}.damaged"
    memory().unlink()
    statement = check(house, Trust(listed())).statement
    monkeypatch.setenv("XDG_STATE_HOME", "/proc")
    with pytest.raises(StorageError, match="cannot be remembered"):
        remember(statement)


def test_the_command_line(cli, house, keys, listed, tmp_path):
    plain = cli("verify", house).stdout
    said = "consistent in itself; only a signature says who made it"
    command = rf"`\S*python\S* -m patchkit verify {house} --signers FILE`\n"
    assert re.search(f"note {said}: {command}", plain)
    signed = json.loads(
        cli("wheelhouse", "sign", "--key", keys / "alice", "--dir", house, "--json").stdout
    )
    assert signed["counter"] == 1
    shutil.copytree(house, tmp_path / "older")
    shown = cli("wheelhouse", "list", "--dir", house).stdout
    assert f"signed on {signed['date']}, counter 1, with the key {signed['key']}" in shown
    assert "counter 2" in cli("wheelhouse", "sign", "--key", keys / "alice", "--dir", house).stdout

    # A machine that has never seen it.
    there = {"XDG_STATE_HOME": str(tmp_path / "there")}
    trust = ("--signers", listed())
    first = cli("verify", house, *trust, env=there).stdout
    assert "signed by alice@example.org on" in first
    assert "counter 2; the first time that it is seen here: nothing to compare with" in first
    assert "note" not in first
    again = json.loads(
        cli("wheelhouse", "verify", "--dir", house, *trust, "--json", env=there).stdout
    )
    found = again["signature"]
    assert (found["signer"], found["counter"], found["seen"]) == ("alice@example.org", 2, 2)
    old = json.loads(cli("verify", tmp_path / "older", *trust, "--json", env=there, rc=8).stdout)
    assert "has counter 1" in old["error"]["what"]
    assert cli("verify", house, "--newer-than", "1", rc=2).stdout == ""


def test_a_changed_wheel_below_a_good_signature_is_found_and_not_remembered(
    cli, house, keys, listed, tmp_path
):
    sign(house, keys / "alice")
    there = {"XDG_STATE_HOME": str(tmp_path / "there")}
    wheel_of(house).write_bytes(b"other")
    said = cli("verify", house, "--signers", listed(), env=there, rc=8).stdout
    assert "has 5 bytes" in said
    assert not (tmp_path / "there").exists()


def test_a_consistent_forgery_is_seen_by_its_signature_alone(cli, house, keys, listed, tmp_path):
    sign(house, keys / "alice")
    forged = write_wheel(tmp_path / "forged", "2.29.7+gb10.abc123", files={"evil": b"1"})
    add(house, forged, {})
    assert "consistent in itself" in cli("verify", house).stdout
    done = cli("verify", house, "--signers", listed(), rc=8)
    assert f"{SUMS}: was changed after alice@example.org signed it on" in done.stderr
    assert "stale: SHA256SUMS, " in cli("wheelhouse", "list", "--dir", house).stdout
    # Nor does it help to sign it with a key of one's own.
    sign(house, keys / "mallory")
    assert "does not allow" in cli("verify", house, "--signers", listed(), rc=8).stderr
