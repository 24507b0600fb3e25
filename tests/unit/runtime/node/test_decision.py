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
        (HEAD, ("--head-ip=10.0.0.1",), UsageError, "--head-ip 10.0.0.1 contradicts"),
        (HEAD, ("--nccl=2.28.9+cuda13.0",), HostError, "NCCL 2.28.9 is loaded here, and 2.30.7"),
        (f"{HEAD}# mine\n", (), HashMismatchError, "was edited after patchkit wrote it"),
        (resealed(f"{HEAD}NCCL_IB_TC=106\n"), (), SourceError, "NCCL_IB_TC is set by no rule"),
    ],
)
def test_what_one_refuses_the_other_refuses(both, text, options, kind, says):
    first, second = both(text, *options)
    assert isinstance(first, kind)
    assert says in str(first)
    assert str(second) == str(first)
    assert type(second) is type(first)
