"""Compare the tables of variables, flags, values and recipes with what they are made from."""

import re

import pytest

from patchkit.runtime.rules.presets import MODELS, flags, load_choices
from patchkit.runtime.rules.releases import nccl_variables, read_table, vllm_variables
from patchkit.runtime.rules.releases import release as release_of
from tools.model_recipes import read_recipes
from tools.release_values import read_choices, read_names


@pytest.mark.releases
def test_the_tables_say_what_a_release_has(version, release):
    home = release(version) / "vllm"
    assert vllm_variables(version) == read_names(home / "envs.py")
    assert vllm_variables(version).keys() == vllm_variables(version, home).keys()
    assert flags(version) == flags(version, home)
    assert "VLLM_HOST_IP" in vllm_variables(version)
    assert {"--nnodes", "--headless", "--served-model-name"} <= flags(version)
    for choices in load_choices().values():
        if choices.flag.partition(".")[0] in flags(version):
            assert {*read_choices(choices, home)} == {
                *choices.allowed_by(version).words
            }, choices.flag
    now = release_of(version)
    recipes = {
        row.name: row.default
        for row in read_table(MODELS).rows
        if release_of(row.first) <= now <= release_of(row.last)
    }
    assert read_recipes(home.parent) == recipes


# NCCL_PARAM(Name, "NAME", default) reads NCCL_NAME; getenv, and names in tables, are quoted whole.
PARAM = re.compile(r'NCCL_PARAM\(\s*\w+,\s*"(?P<name>\w+)"')
QUOTED = re.compile(r'"(?P<name>NCCL_[A-Z0-9_]+)"')
SOURCES = (".cc", ".cu", ".h")


def test_the_table_of_nccl_says_what_its_sources_read(nccl_release):
    found = set()
    for place in (nccl_release / "src").rglob("*"):
        if place.suffix in SOURCES:
            text = place.read_text(encoding="utf-8", errors="replace")
            found |= {f"NCCL_{match['name']}" for match in PARAM.finditer(text)}
            found |= {match["name"] for match in QUOTED.finditer(text)}
    known = set(nccl_variables("2.29.7"))
    assert found <= known
    # The rest is read by the examples of plugins, which are elsewhere in the sources.
    examples = (
        "NCCL_INSPECTOR_",
        "NCCL_PROFILE_",
        "NCCL_PROFILER_CE_",
        "NCCL_TUNER_CONFIG_FILE",
    )
    assert [name for name in known - found if not name.startswith(examples)] == []
