"""Every format, read by the program that it is for, against what patchkit says that it reads."""

import contextlib
import shutil
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patchkit.errors import SourceError, UsageError
from patchkit.runtime.envfile.env_file import (
    EnvEntry,
    Format,
    parse_assignments,
    render_env_file,
)
from support.env_consumers import (
    docker,
    read_by_systemd,
    shells,
    sourced,
    systemd_library,
)

NASTY = "'\"\\$`#; \t\n\r=~*?{}!%&|<>()[]^:,-aA0é\0\x01\x1b\x7f\x85\u2028\ufeff\ufdd0"
VALUES = (
    st.text(st.characters(exclude_categories=()))
    | st.text(st.sampled_from(NASTY))
    | st.from_regex(r"[A-Za-z0-9_@%+=:,./^-]*", fullmatch=True)
    | st.sampled_from(
        ["^lo,docker,veth", "=rocep1s0f0", "~", "a:~/b", "$HOME", "C:\\", "\\\n"]
    )
)
REASONS = st.text(st.sampled_from(NASTY)) | st.text()
BATCH = st.lists(st.tuples(VALUES, REASONS), min_size=1, max_size=40)
few = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
SHELLS = {f"shell {shell[0].rsplit('/', 1)[1]}": shell for shell in shells()}
OWN = {"systemd": Format.SYSTEMD, "docker": Format.DOCKER}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("env")


@pytest.fixture(scope="module", params=[*SHELLS, *OWN])
def program(request, folder):
    """A program that is here: its own format, and how it reads a file of a format."""
    name = request.param
    if name in SHELLS:
        shell = SHELLS[name]
        yield (
            Format.SH,
            lambda kind, path: sourced(shell, path, exported=kind is Format.SH),
        )
    elif name == "systemd":
        if systemd_library() is None:
            pytest.skip("no libsystemd-shared here")
        yield Format.SYSTEMD, lambda kind, path: read_by_systemd(path)
    elif not shutil.which("docker"):
        pytest.skip("no docker command here")
    else:
        with docker(folder) as read:
            yield (
                Format.DOCKER,
                lambda kind, path, **environment: read(path, **environment),
            )


def held(kind, batch):
    """Entries that the format can hold; the others are refused, and each alone."""
    entries = [EnvEntry(f"V{number}", *pair) for number, pair in enumerate(batch)]
    for entry in entries:
        with contextlib.suppress(UsageError):
            render_env_file(kind, [], [entry])
            yield entry


def written(kind, batch, folder):
    """The file of a batch, and what it has to hold."""
    entries = list(held(kind, batch))
    path = folder / f"file.{kind}"
    path.write_bytes(
        render_env_file(kind, ["role=head", "about: \n A=b"], entries).encode()
    )
    expected = {entry.name: entry.value for entry in entries}
    assert parse_assignments(kind, path.read_bytes().decode(), "file") == expected
    return path, expected


@few
@given(BATCH)
def test_a_program_reads_its_format_and_the_common_one(program, folder, batch):
    own, read = program
    for kind in (own, Format.ENV):
        path, expected = written(kind, batch, folder)
        assert read(kind, path) == expected


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.text(st.sampled_from("='\"\\ \t#ab:\n\r;$~")), min_size=1, max_size=5)
)
def test_what_is_parsed_of_any_file_is_what_the_program_reads(program, folder, tails):
    kind, read = program
    begin = "export V" if kind is Format.SH else "V"
    text = "".join(f"{begin}{number}={tail}\n" for number, tail in enumerate(tails))
    try:
        expected = parse_assignments(kind, text, "file")
    except SourceError:
        return
    path = folder / f"any.{kind}"
    path.write_text(text, newline="")
    assert read(kind, path) == expected


def test_a_secret_is_the_callers(program, folder):
    kind, read = program
    path = folder / f"secret.{kind}"
    entries = [EnvEntry("HF_TOKEN", "", "gated models"), EnvEntry("A", "b")]
    path.write_text(render_env_file(kind, [], entries))
    assert read(kind, path) == {"A": "b"}
    if kind is Format.DOCKER:
        read = partial(read, HF_TOKEN="hf_x")
    elif kind is Format.SH:
        path.with_suffix(".setting").write_text(f"HF_TOKEN='hf_x'\n. {path}\n")
        path = path.with_suffix(".setting")
    else:
        return
    assert read(kind, path) == {"A": "b", "HF_TOKEN": "hf_x"}
