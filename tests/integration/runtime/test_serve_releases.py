"""Compare what serve-args prints with the code of every release, and with its own parser."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from patchkit.runtime.rules.flags import load_choices
from patchkit.runtime.rules.presets import MODELS
from patchkit.runtime.rules.releases import read_table
from patchkit.runtime.rules.releases import release as release_of
from patchkit.runtime.serve.args import release_flags
from tools import serve_lines
from tools.model_recipes import read_recipes
from tools.release_values import read_choices

pytestmark = pytest.mark.releases
PARSE = Path(__file__).parents[3] / "tests" / "e2e" / "emulation" / "parse_args.py"
CANNOT_IMPORT = 3
# Refused by every release: else a parser that takes anything would look like a success.
NONSENSE = ["vllm", "serve", "x", "--nonsense", "1"]


@pytest.fixture(scope="module")
def home(release, version):
    return release(version) / "vllm"


@pytest.fixture(scope="module")
def pairs(version):
    """Every flag and value that is printed for a release."""
    everything = serve_lines.everything(version)
    return {(flag.flag, flag.value) for served in everything for flag in served.flags}


def test_every_flag_is_declared(home, pairs):
    servers = (home / "entrypoints").rglob("cli_args.py")
    code = "\n".join(file.read_text() for file in (home / "engine/arg_utils.py", *servers))
    flags = {flag for flag, _ in pairs}
    assert len(flags) > 15
    for flag in flags:
        field = flag.removeprefix("--").replace("-", "_")
        assert f'"{flag}"' in code or re.search(rf"^    {field}: ", code, re.MULTILINE), flag


def test_the_table_of_values_is_what_the_code_lists(home, version):
    for choices in load_choices():
        if release_flags(version, None).has(choices.flag):
            assert {*read_choices(choices, home)} == {*choices.known(version)}, choices.flag


def test_the_recipes_are_in_the_table(home, version):
    now = release_of(version)
    there = {
        row.name: row.default
        for row in read_table(MODELS).rows
        if release_of(row.first) <= now <= release_of(row.last)
    }
    assert read_recipes(home.parent) == there


def test_host_is_the_api_servers_alone(home):
    """Nodes of one model do not need it: no engine, executor, worker or config reads the flag."""
    assert '"--host"' not in (home / "engine/arg_utils.py").read_text()
    servers = "\n".join(each.read_text() for each in (home / "entrypoints").rglob("*.py"))
    assert "args.host" in servers
    code = [file for part in ("config", "engine", "v1") for file in (home / part).rglob("*.py")]
    assert len(code) > 100
    assert not [file for file in code if "args.host" in file.read_text()]


def test_draft_methods_are_known(home, pairs):
    code = (home / "config/speculative.py").read_text()
    for flag, value in pairs:
        if flag == "--speculative-config":
            assert f'"{json.loads(value)["method"]}"' in code


def test_the_same_with_the_code_at_hand(home, version, pairs):
    installed = release_flags(version, home)
    for flag, value in pairs:
        assert installed.has(flag), flag
        assert installed.takes(flag, value), (flag, value)


def test_vllm_itself_takes_every_line(home, version, tmp_path):
    """PATCHKIT_VLLM_REQUIREMENTS: a Python that has what vLLM requires, on a CPU."""
    python = os.environ.get("PATCHKIT_VLLM_REQUIREMENTS")
    if not python:
        pytest.skip("PATCHKIT_VLLM_REQUIREMENTS names no Python with vLLM's requirements")
    about = tmp_path / f"vllm-{version}+cpu.dist-info"
    about.mkdir()
    # By its version an older vLLM knows that it is for CPUs.
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    path = f"{tmp_path}:{home.parent}"
    lines = [list(served.words) for served in serve_lines.everything(version)]
    done = subprocess.run(
        [python, PARSE],
        input=json.dumps([*lines, NONSENSE]),
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode == CANNOT_IMPORT:
        pytest.skip(f"vllm {version}: {done.stderr.strip().splitlines()[-1]}")
    *verdicts, nonsense = json.loads(done.stdout)
    assert "unrecognized arguments: --nonsense" in nonsense
    refused = {" ".join(words): said for words, said in zip(lines, verdicts, strict=True) if said}
    assert not refused
    assert len(verdicts) > 90
