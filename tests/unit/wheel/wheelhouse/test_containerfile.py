"""The Containerfile for a wheelhouse: printed as it is, and sound."""

import ast
import re

import pytest
from click.testing import CliRunner

from patchkit.cli import group
from patchkit.errors import UsageError
from patchkit.records import RECIPES

TEXT = (RECIPES / "export" / "Containerfile").read_text()


def test_the_file_is_printed_as_it_is():
    done = CliRunner().invoke(group, ["export", "containerfile"])
    assert done.exit_code == 0
    assert done.stdout == TEXT
    assert "--build-arg BASE=" in done.stderr


def test_its_packages_come_from_the_wheelhouse_by_hash_alone():
    (install,) = (line for line in TEXT.splitlines() if "pip install" in line)
    for word in ("--no-index", "--no-deps", "--require-hashes", "/wheelhouse"):
        assert word in install
    assert not re.search(r"^ARG BASE=", TEXT, re.MULTILINE)  # nobody gets a moving base


def test_the_smoke_test_is_python_that_finds_this_process_without_a_libnccl(capfd):
    (script,) = re.findall(r"-c '(.*?)'", TEXT, re.DOTALL)
    statements = script.replace("\\\n", "")
    ast.parse(statements)
    exec(statements.replace('("torch", "vllm")', "()"))
    assert capfd.readouterr().out == "\n"


@pytest.mark.parametrize("image", ["a\nRUN x", "--platform=x y", "$(id)"])
def test_an_image_has_a_name(image):
    words = ["export", "kubernetes", "m", "--image", image, "--vllm", "0.33.0"]
    done = CliRunner().invoke(group, words)
    assert isinstance(done.exception, UsageError) or done.exit_code == 2
