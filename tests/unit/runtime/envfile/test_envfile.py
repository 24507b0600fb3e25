"""Env files: what is refused, what the first line says, and no file replaced by surprise."""

import os
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkit.errors import SourceError, StorageError, UsageError
from patchkit.runtime.envfile.env_file import (
    EnvEntry,
    Format,
    head_facts,
    is_untouched,
    parse_assignments,
    render_env_file,
    write,
)

HEADER = [
    "role=head topology=roce executor=mp vllm=0.25.1 nodes=2 head=192.168.100.11",
    "For spark-1.",
]
TWINS = EnvEntry("NCCL_IB_HCA", "rocep1s0f0,roceP2p1s0f0", "Both halves of the cage.")
ABLE = {
    **dict.fromkeys(("", "^lo,docker"), "env sh systemd docker"),
    **dict.fromkeys(
        ("two words", "$HOME", "~/models", "a#b", "é"), "sh systemd docker"
    ),
    "two\nlines": "sh systemd",
    **dict.fromkeys(("\ufeff", "\x1b"), "sh docker"),
    **dict.fromkeys(("\0", "\ud800"), ""),
}


def test_what_a_format_cannot_hold_names_those_that_can():
    for (value, able), kind in product(ABLE.items(), Format):
        if kind in able.split():
            text = render_env_file(kind, [], [EnvEntry("A", value)])
            assert parse_assignments(kind, text, "x") == {"A": value}
            continue
        with pytest.raises(UsageError, match=r"^A: the value holds") as error:
            render_env_file(kind, [], [EnvEntry("A", value)])
        names = ", ".join(able.split()) or "none"
        assert error.value.hint == f"--format that can hold it: {names}"


def test_what_no_file_can_hold():
    for kind, facts, entries, says in (
        *(
            (Format.SH, [], [EnvEntry(name, "1")], "a shell sets this variable itself")
            for name in ("IFS", "PWD", "UID", "_", "BASH_ENV", "RANDOM")
        ),
        *(
            (Format.ENV, [fact], [], "cannot stand in the first line")
            for fact in ("two words=1", 'a="x"', "nothing", "a=é")
        ),
    ):
        with pytest.raises(UsageError, match=says):
            render_env_file(kind, facts, entries)


@pytest.mark.parametrize("kind", Format)
@settings(deadline=None)
@given(
    reason=st.text()
    | st.text(st.sampled_from("\n\r\x0b\x0c\x1c\x85\u2028\u2029\\#=A "))
)
def test_a_reason_stays_a_comment(kind, reason):
    text = render_env_file(
        kind, [*HEADER, reason], [EnvEntry("A", "1", reason), EnvEntry("B", "2")]
    )

    assert parse_assignments(kind, text, "x") == {"A": "1", "B": "2"}
    rows = [row for row in text.splitlines() if row]
    assert len([row for row in rows if not row.startswith("#")]) == 2
    assert max(map(len, rows[1:])) <= 101
    assert not any(row.endswith("\\") for row in rows)


@pytest.mark.parametrize("kind", Format)
def test_the_first_line_tells_what_the_file_is_for_and_whether_it_was_edited(kind):
    text = render_env_file(kind, HEADER, [TWINS])

    facts = f"{HEADER[0]} format={kind}".split()
    assert head_facts(text) == dict(fact.split("=") for fact in facts)
    assert is_untouched(text)
    assert not is_untouched(text.replace("rocep1s0f0", "rocep1s0f1"))
    assert not is_untouched(text.replace("role=head", "role=worker"))
    assert not is_untouched(text + "\n")


def test_a_file_of_somebody_else_says_nothing():
    for text in ("", "A=1\n", "# patchkit env: role=head\n", '{"header": {}}', "{"):
        assert head_facts(text) == {}
        assert not is_untouched(text)


@pytest.mark.parametrize("kind", Format)
def test_a_secret_is_never_written(kind):
    text = render_env_file(
        kind, HEADER, [EnvEntry("HF_TOKEN", "", "Gated models."), TWINS]
    )

    assert parse_assignments(kind, text, "x") == {TWINS.name: TWINS.value}
    assert "HF_TOKEN_PATH" in text
    with pytest.raises(
        UsageError, match=r"^HF_TOKEN: the value of a secret is not"
    ) as error:
        render_env_file(kind, HEADER, [EnvEntry("HF_TOKEN", "hf_abcdef")])
    assert "hf_abcdef" not in str(error.value)


def test_what_cannot_be_read_is_told_with_its_line():
    for kind, text, message in (
        (
            Format.ENV,
            "A=1\nB='2'\n",
            r"^f:2: is not NAME=value with plain characters only",
        ),
        (Format.SH, "export A='1\n2'\nexport B=$A\n", r"^f:3: is not one assignment"),
        (Format.SH, "A=1 vllm serve\n", r"^f:1: is not one assignment"),
        (Format.SH, "rm\n", r"^f:1: is not one assignment"),
        (Format.SYSTEMD, "A=1\nexport B=2\n", r"^f:2: is not NAME="),
        (Format.SYSTEMD, 'A="1\n\n', r"^f:1: is not NAME="),
        # Before systemd 254 this swallows the next line; a CR ends a comment.
        (Format.SYSTEMD, "# C:\\\nA=1\n", r"^f:1: is not NAME="),
        (Format.SYSTEMD, "# a\rLD_PRELOAD=/x\n", r"^f:1: is not NAME="),
        (Format.DOCKER, "A=1\nexport B=2\n", r"^f:2: is not NAME=value or NAME"),
    ):
        with pytest.raises(SourceError, match=message):
            parse_assignments(kind, text, "f")


ONE = render_env_file(Format.ENV, HEADER, [EnvEntry("A", "1")])
TWO = render_env_file(Format.ENV, HEADER, [EnvEntry("A", "2")])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "head.env"


def mode(path):
    return path.stat().st_mode & 0o777


def test_created_unchanged_replaced(path):
    assert write(path, ONE, force=False, private=False) == "created"
    before = path.stat()
    assert write(path, ONE, force=False, private=False) == "unchanged"
    after = path.stat()  # reading it may change st_atime
    assert (after.st_ino, after.st_ctime_ns) == (before.st_ino, before.st_ctime_ns)
    assert write(path, TWO, force=False, private=False) == "replaced"
    assert path.read_text() == TWO
    assert [each.name for each in path.parent.iterdir()] == ["head.env"]


@pytest.mark.parametrize(
    "old", [ONE.replace("A=1", "A=3"), "A=3\n"], ids=["edited", "foreign"]
)
def test_work_of_somebody_is_shown_without_secrets_and_kept_unless_forced(path, old):
    old += "export HF_TOKEN='hf_abcdef'\nOPENAI_API_KEY: sk-abcdef\n"
    path.write_text(old)
    with pytest.raises(UsageError, match="--force") as error:
        write(path, TWO, force=False, private=False)
    for line in ("\n-A=3\n", "\n+A=2", "\n-export HF_TOKEN='(masked)'\n"):
        assert line in error.value.what
    assert "abcdef" not in str(error.value)
    assert path.read_text() == old
    assert write(path, TWO, force=True, private=False) == "replaced"
    assert path.read_text() == TWO


def test_modes(path):
    old = os.umask(0o027)
    try:
        write(path, ONE, force=False, private=False)
    finally:
        os.umask(old)
    assert mode(path) == 0o640
    path.chmod(0o604)
    write(path, TWO, force=False, private=False)
    assert mode(path) == 0o604
    assert write(path, TWO, force=False, private=True) == "replaced"
    assert mode(path) == 0o600
    path.unlink()
    write(path, ONE, force=False, private=True)
    assert mode(path) == 0o600


def test_what_is_no_file_stays(tmp_path):
    (tmp_path / "real.env").write_text(ONE)
    (tmp_path / "link").symlink_to(tmp_path / "real.env")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, kind, says in (
        ("link", UsageError, r"is a link to .*real\.env"),
        ("folder", UsageError, "is not a file"),
        ("pipe", UsageError, "is not a file"),
        (
            "none/head.env",
            StorageError,
            "No such file or directory; nothing was changed",
        ),
        ("real.env/head.env", StorageError, "Not a directory; nothing was changed"),
    ):
        for force in (False, True):
            with pytest.raises(kind, match=says):
                write(tmp_path / name, TWO, force=force, private=False)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real.env").read_text() == ONE
