"""Units of a group: what is written for each node."""

import json

import pytest

from patchkit.cluster.launch.units import unit_line
from support.clusters import cluster, node_facts, units_of
from tools import golden_units
from tools.golden_units import CASES


@pytest.mark.parametrize("case", CASES)
def test_files_are_those_of_the_golden(case, tmp_path):
    stored = golden_units.DATA / f"{case}.txt"
    found = golden_units.text(golden_units.units(case, tmp_path))
    assert found == stored.read_text(), "look at it, then run tools/golden_units.py"


def test_one_id_for_all_nodes_and_another_for_another_start(tmp_path):
    def ids(case):
        files = golden_units.units(case, tmp_path).node_files()
        return {json.loads(each["group.json"])["id"] for each in files}

    assert len(ids("pair")) == 1
    assert ids("pair") != ids("pair-ray")


def test_a_ray_that_copies_the_heads_variables_brings_no_folder_of_its_home(tmp_path):
    facts = [node_facts(tmp_path, node=number, vllm="0.20.0") for number in (0, 1)]
    made = units_of(cluster("a", "b", executor="ray"), facts, golden_units.LARGE)
    for text in (files["patchkit-vllm.service"] for files in made.node_files()):
        assert "VLLM_CACHE_ROOT" not in text
        assert " CUDA_CACHE_PATH=%C/patchkit/vllm-0.20.0/cuda " in text


def test_words_are_written_as_systemd_reads_them():
    words = ["plain", "", "a b", 'say "$x"', "50%", "a\\b\n"]
    written = r'''plain "" "a b" "say \"$$x\"" 50%% "a\\b\x0a"'''
    assert unit_line(["/bin/vllm", *words]) == f"/bin/vllm {written}"
