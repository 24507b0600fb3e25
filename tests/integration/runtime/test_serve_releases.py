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


def test_the_same_with_the_code_at_hand(home, version, pairs):
    assert {flag for flag, _ in pairs} <= flags(version, home)
