"""Every format, read by the program that it is for, against what patchkit says that it reads."""

from __future__ import annotations

import contextlib
import shutil

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from patchkit.cli import group
from patchkit.errors import SourceError, UsageError
from patchkit.runtime.envfile.header import render_env_file
from patchkit.runtime.envfile.parse import parse
from patchkit.runtime.envfile.syntax import EnvEntry, Format
from support import hosts
from support.env_consumers import docker, read_by_systemd, shells, sourced, systemd_library

NASTY = "'\"\\$`#; \t\n\r=~*?{}!%&|<>()[]^:,-aA0é\0\x01\x1b\x7f\x85\u2028\ufeff\ufdd0"
VALUES = (
    st.text(st.characters(exclude_categories=()))
    | st.text(st.sampled_from(NASTY))
    | st.from_regex(r"[A-Za-z0-9_@%+=:,./^-]*", fullmatch=True)
    | st.sampled_from(["^lo,docker,veth", "=rocep1s0f0", "~", "a:~/b", "$HOME", "C:\\", "\\\n"])
)
REASONS = st.text(st.sampled_from(NASTY)) | st.text()
BATCH = st.lists(st.tuples(VALUES, REASONS), min_size=1, max_size=40)
few = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
DOCKER = pytest.mark.skipif(not shutil.which("docker"), reason="no docker command here")
SYSTEMD = pytest.mark.skipif(systemd_library() is None, reason="no libsystemd-shared here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("env")


@pytest.fixture(params=shells(), ids=lambda shell: shell[0].rsplit("/", 1)[1])
def shell(request):
    return request.param


@pytest.fixture(scope="module")
def read_by_docker(folder):
    with docker(folder) as read:
        yield read


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
    path.write_bytes(render_env_file(kind, ["role=head", "about: \n A=b"], entries).encode())
    expected = {entry.name: entry.value for entry in entries}
    assert parse(kind, path.read_bytes().decode(), "file") == expected
    return path, expected


@few
@given(BATCH)
def test_shells_source_sh(shell, folder, batch):
    path, expected = written(Format.SH, batch, folder)

    assert sourced(shell, path) == expected


@SYSTEMD
@few
@given(BATCH)
def test_systemd_reads_systemd(folder, batch):
    path, expected = written(Format.SYSTEMD, batch, folder)

    assert read_by_systemd(path) == expected


@DOCKER
@few
@given(BATCH)
def test_docker_reads_docker(read_by_docker, folder, batch):
    path, expected = written(Format.DOCKER, batch, folder)

    assert read_by_docker(path) == expected


@few
@given(BATCH)
def test_shells_read_env(shell, folder, batch):
    path, expected = written(Format.ENV, batch, folder)

    assert sourced(shell, path, exported=False) == expected


@SYSTEMD
@few
@given(BATCH)
def test_systemd_reads_env(folder, batch):
    path, expected = written(Format.ENV, batch, folder)

    assert read_by_systemd(path) == expected


@DOCKER
@few
@given(BATCH)
def test_docker_reads_env(read_by_docker, folder, batch):
    path, expected = written(Format.ENV, batch, folder)

    assert read_by_docker(path) == expected


@pytest.mark.parametrize("size", [65_532, 65_533, 131_068, 131_069])
def test_the_longest_values(folder, size):
    """As long as docker reads, one more; as long as Linux takes, one more (of ``V0=…``)."""
    fits = {kind: bool(list(held(kind, [("x" * size, "")]))) for kind in Format}

    assert fits[Format.DOCKER] == (size <= 65_532)
    assert fits[Format.SH] == (size <= 131_068)


def test_the_longest_value_of_a_process(folder):
    path, expected = written(Format.SH, [("x" * 131_068, "")], folder)

    assert sourced(next(shells()), path) == expected


@DOCKER
def test_the_longest_line_of_docker(read_by_docker, folder):
    path, expected = written(Format.DOCKER, [("x" * 65_532, "")], folder)

    assert read_by_docker(path) == expected


@SYSTEMD
@settings(deadline=None, max_examples=400)
@given(st.text(st.sampled_from("A='\"\\ \t\n#;$ab")))
@example("A=; \\")
def test_what_is_parsed_of_any_systemd_file_is_what_systemd_reads(folder, text):
    try:
        expected = parse(Format.SYSTEMD, text, "file")
    except SourceError:
        return
    path = folder / "any.systemd"
    path.write_text(text, newline="")

    assert read_by_systemd(path) == expected


@settings(deadline=None, max_examples=150)
@given(st.lists(st.text(st.sampled_from("='\"\\ \t#ab:\n$~")), min_size=1, max_size=5))
def test_what_is_parsed_of_any_shell_file_is_what_shells_read(folder, tails):
    text = "".join(f"export V{number}={tail}\n" for number, tail in enumerate(tails))
    try:
        expected = parse(Format.SH, text, "file")
    except SourceError:
        return
    path = folder / "any.sh"
    path.write_text(text, newline="")

    assert sourced(next(shells()), path, exported=False) == expected


@DOCKER
@few
@given(st.text(st.sampled_from("VA= \t\r\n#'\"\u2028\u00a0")))
def test_what_is_parsed_of_any_docker_file_is_what_docker_reads(read_by_docker, folder, text):
    try:
        expected = parse(Format.DOCKER, text, "file")
    except SourceError:
        return
    path = folder / "any.docker"
    path.write_text(text, newline="")

    assert read_by_docker(path) == expected


@pytest.fixture(params=["cable_port0", "ring", "no_rdma", "thor"])
def generated(request, tmp_path):
    """``generated(kind)``: what `patchkit env` writes on such a machine, as a file and as names."""
    root = hosts.build(tmp_path, request.param, node=0)
    nodes, topology = (3, "ring") if request.param == "ring" else (2, "auto")
    options = ["--role", "head", "--nodes", nodes, "--topology", topology, "--vllm", "0.25.1"]

    def make(kind):
        path = tmp_path / f"head.{kind}"
        asked = [*options, "--nccl", "2.30.7", "--root", root, "--format", kind, "-o", path]
        done = CliRunner().invoke(group, ["env", *map(str, asked)])
        assert done.exit_code == 0, done.output
        return path, parse(kind, path.read_text(), "file")

    return make


def test_what_env_writes_is_read_by_shells(generated, shell):
    path, expected = generated(Format.SH)
    assert len(expected) > 4
    assert sourced(shell, path) == expected
    path, plain = generated(Format.ENV)
    assert plain == expected
    assert sourced(shell, path, exported=False) == expected


@SYSTEMD
@pytest.mark.parametrize("kind", [Format.SYSTEMD, Format.ENV])
def test_what_env_writes_is_read_by_systemd(generated, kind):
    path, expected = generated(kind)

    assert read_by_systemd(path) == expected


@DOCKER
@pytest.mark.parametrize("kind", [Format.DOCKER, Format.ENV])
def test_what_env_writes_is_read_by_docker(generated, read_by_docker, kind):
    path, expected = generated(kind)

    assert read_by_docker(path) == expected


SECRET = [EnvEntry("HF_TOKEN", "", "gated models"), EnvEntry("A", "b")]


def test_a_secret_of_the_caller_stays_one_in_sh(shell, folder):
    path = folder / "secret.sh"
    path.write_text(render_env_file(Format.SH, [], SECRET))

    assert sourced(shell, path) == {"A": "b"}
    setting = folder / "setting.sh"
    setting.write_text(f"HF_TOKEN='hf_x'\n. {path}\n")
    assert sourced(shell, setting) == {"A": "b", "HF_TOKEN": "hf_x"}


@DOCKER
def test_a_secret_of_the_caller_is_handed_on_by_docker(read_by_docker, folder):
    path = folder / "secret.docker"
    path.write_text(render_env_file(Format.DOCKER, [], SECRET))

    assert read_by_docker(path, HF_TOKEN="hf_x") == {"A": "b", "HF_TOKEN": "hf_x"}
    assert read_by_docker(path) == {"A": "b"}


@SYSTEMD
def test_systemd_finds_no_secret(folder):
    path = folder / "secret.systemd"
    path.write_text(render_env_file(Format.SYSTEMD, [], SECRET))

    assert read_by_systemd(path) == {"A": "b"}
