"""Check that a node decides the same for its env file and for its command line."""

from __future__ import annotations

import re
import venv

import pytest
from click.testing import CliRunner

from patchkit.cli import group
from patchkit.errors import HashMismatchError, HostError, SourceError, UsageError
from patchkit.runtime.envfile.header import BLANK, sealed
from support import hosts
from tools import golden_env

HEAD = (golden_env.DATA / "head.env").read_text(encoding="utf-8")  # vLLM 0.33.0, NCCL 2.30.7


def resealed(text: str) -> str:
    return sealed(re.sub(r"digest=[0-9a-f]{16}", f"digest={BLANK}", text, count=1))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return hosts.build(tmp_path_factory.mktemp("worker"), "cable_port0", node=1)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A Python that has vLLM 0.32.0."""
    home = tmp_path_factory.mktemp("python")
    venv.create(home, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    for folder in ("vllm", "vllm-0.32.0.dist-info"):
        (site / folder).mkdir()
    (site / "vllm/__init__.py").touch()
    (site / "vllm-0.32.0.dist-info/METADATA").write_text("Name: vllm\nVersion: 0.32.0\n")
    return home / "bin/python"


@pytest.fixture
def both(root, tmp_path):
    """Ask a worker for both, with a head's file: the exceptions, None for what was printed."""

    def run(text, *options):
        file = tmp_path / "head.env"
        file.write_text(text, encoding="utf-8")
        shared = ["--role=worker", f"--from={file}", f"--root={root}", *options]
        verbs = (["env"], ["serve-args", "openai/gpt-oss-120b"])
        return [CliRunner().invoke(group, [*verb, *shared]).exception for verb in verbs]

    return run


def test_both_are_written_with_the_heads_file(both):
    assert both(HEAD) == [None, None]


def test_another_installed_vllm_than_the_heads_is_refused_by_both(both, python):
    for error in both(HEAD, f"--python={python}"):
        assert isinstance(error, HostError)
        assert re.fullmatch(
            r"vLLM 0\.32\.0 is installed here, and \S+/head\.env is for 0\.33\.0", error.what
        )
        assert error.hint


@pytest.mark.parametrize(
    ("text", "options", "kind", "says"),
    [
        (HEAD, ("--vllm=0.32.0",), UsageError, "--vllm 0.32.0 contradicts"),
        (HEAD, ("--topology=socket",), UsageError, "--topology socket contradicts"),
        (HEAD, ("--executor=ray",), UsageError, "--executor ray contradicts"),
        (HEAD, ("--head-ip=10.0.0.1",), UsageError, "--head-ip 10.0.0.1 contradicts"),
        (HEAD, ("--nccl=2.28.9+cuda13.0",), HostError, "NCCL 2.28.9 is loaded here, and 2.30.7"),
        (f"{HEAD}# mine\n", (), HashMismatchError, "was edited after patchkit wrote it"),
        (resealed(f"{HEAD}LD_PRELOAD=/x.so\n"), (), SourceError, "LD_PRELOAD runs code"),
        (resealed(f"{HEAD}NCCL_IB_TC=106\n"), (), SourceError, "NCCL_IB_TC is set by no rule"),
    ],
)
def test_what_one_refuses_the_other_refuses(both, text, options, kind, says):
    first, second = both(text, *options)
    assert isinstance(first, kind)
    assert says in str(first)
    assert str(second) == str(first)
    assert type(second) is type(first)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--role=single", "--nodes=2"), "--role single is one node without a head"),
        (("--role=head", "--nodes=1"), "--role head needs two nodes or more"),
        (("--role=worker",), "missing --head-ip"),
        (("--role=single", "--vllm=0.10.0"), "openai/gpt-oss-20b takes vLLM 0.10.1 or newer"),
        (("--role=single", "--quantization=fp8"), "openai/gpt-oss-20b is mxfp4, not fp8"),
        (("--role=head", "--executor=mp", "--vllm=0.11.0"), "vLLM 0.11.0 cannot use mp"),
    ],
)
def test_what_makes_no_sense_makes_none_for_both(root, options, says):
    model = "openai/gpt-oss-20b"
    for verb in (("env", f"--model={model}"), ("serve-args", model)):
        done = CliRunner().invoke(group, [*verb, f"--root={root}", "--vllm=0.33.0", *options])
        assert isinstance(done.exception, UsageError)
        assert says in done.exception.what


def test_a_heads_own_file_is_its_decision(root, tmp_path):
    """A command line can be written on any machine that is told to, an env file cannot."""
    file = tmp_path / "head.env"
    file.write_text(HEAD, encoding="utf-8")
    asked = ["serve-args", "a/b", f"--from={file}", f"--root={root}"]
    done = CliRunner().invoke(group, asked)
    assert isinstance(done.exception, HostError)
    assert f"{file} is for the head, 192.168.100.10, and this host has" in done.exception.what
    assert "with --role worker" in done.exception.hint
    done = CliRunner().invoke(group, [*asked, "--role=head"])
    assert "--nnodes 2 --node-rank 0 --master-addr 192.168.100.10" in done.stdout
    assert "the line of 192.168.100.10, another node than this one" in " ".join(done.stderr.split())
    done = CliRunner().invoke(
        group, ["env", "--role=head", f"--from={file}", f"--root={root}", "--vllm=0.33.0"]
    )
    assert "--from is for a worker" in str(done.exception)
