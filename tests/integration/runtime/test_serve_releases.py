"""Compare what serve-args prints with the code of every release."""

from __future__ import annotations

import pytest

from patchkit.runtime.rules.flags import flags, load_choices
from patchkit.runtime.rules.presets import MODELS
from patchkit.runtime.rules.releases import read_table
from patchkit.runtime.rules.releases import release as release_of
from tools import serve_lines
from tools.model_recipes import read_recipes
from tools.release_values import read_choices

pytestmark = pytest.mark.releases


@pytest.fixture(scope="module")
def home(release, version):
    return release(version) / "vllm"


@pytest.fixture(scope="module")
def pairs(version):
    """Every flag and value that is printed for a release."""
    everything = serve_lines.everything(version)
    return {(flag.flag, flag.value) for served in everything for flag in served.flags}


def test_the_table_of_values_is_what_the_code_lists(home, version):
    for choices in load_choices().values():
        if choices.flag in flags(version):
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


def test_the_same_with_the_code_at_hand(home, version, pairs):
    assert {flag for flag, _ in pairs} <= flags(version, home)
