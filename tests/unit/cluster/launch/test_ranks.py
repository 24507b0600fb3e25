"""The plan of a cluster: what each node would decide by itself; and the units of its nodes."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from patchkit.cluster.agent.node_facts import ModelPrint
from patchkit.cluster.launch.ranks import other_model, planned_ranks, served_model
from patchkit.cluster.launch.units import unit_line
from patchkit.errors import HostError, UsageError
from support.clusters import cluster, node_facts, units_of
from tools import golden_units
from tools.golden_units import CASES

MODEL = "openai/gpt-oss-120b"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NO_CABLE = (
    'or use another network, by sockets: address = "ADDRESS" in the head\'s [[node]]'
)
PAIR = ("spark-1", "spark-2")


@pytest.fixture
def facts(tmp_path):
    return [node_facts(tmp_path, node=number) for number in (0, 1)]


def words(facts, model=MODEL, file=None, **serve):
    return " ".join(units_of(file or cluster(*PAIR, **serve), facts, model).words(0))


def test_who_is_on_the_lan_may_ask(facts):
    assert "--host 10.0.0.10 --port 9000" in words(facts, listen="lan", port=9000)


def test_a_pinned_model_is_served_from_its_folder_by_its_name(facts):
    file = replace(cluster(*PAIR), models={MODEL: COMMIT})
    found = words(facts, file=file)
    folder = "/home/spark/models/openai--gpt-oss-120b@0123456789ab"
    assert f"vllm serve {folder} " in found
    assert found.endswith(f"--served-model-name {MODEL}")


HELD = ModelPrint(
    folder="/m", problem="", commit=COMMIT, files=5, size=9000, digest="d" * 64
)
BARE = replace(HELD, commit="")
OTHER_COMMIT = "f" * 40


@pytest.mark.parametrize(
    ("prints", "pin", "node", "says"),
    [
        ((HELD, HELD), COMMIT, "", ""),
        ((BARE, BARE), COMMIT, "", ""),
        (
            (HELD, BARE),
            COMMIT,
            "spark-2",
            "has no record of its files, and spark-1 has one",
        ),
        (
            (BARE, HELD),
            "",
            "spark-1",
            "has no record of its files, and spark-2 has one",
        ),
        (
            (HELD, replace(HELD, commit=OTHER_COMMIT)),
            "",
            "spark-2",
            "is commit ffffffffffff",
        ),
        ((HELD, HELD), OTHER_COMMIT, "spark-1", "and cluster.toml pins ffffffffffff"),
        (
            (BARE, replace(BARE, size=10)),
            "",
            "spark-2",
            "5 files, 10 bytes, not 5, 9,000 bytes",
        ),
        (
            (HELD, replace(HELD, digest="e" * 64)),
            "",
            "spark-2",
            "other contents of small files",
        ),
    ],
    ids=[
        "alike",
        "by hand",
        "part",
        "part on head",
        "commit",
        "pin",
        "sizes",
        "contents",
    ],
)
def test_a_node_with_another_model_is_named(prints, pin, node, says):
    found, what = other_model(dict(zip(PAIR, prints, strict=True)), pin) or ("", "")
    assert found == node
    assert says in what


def test_a_release_that_is_broken_for_the_architecture_of_a_folder(tmp_path):
    """The folder's name says nothing, and only its node can read its config."""
    folder = "/models/mine"
    held = replace(
        BARE, folder=folder, architectures=("Gemma4ForConditionalGeneration",)
    )
    facts = [node_facts(tmp_path, vllm="0.27.0", models={folder: held})]
    file = cluster("a")
    (rank,) = planned_ranks(file, facts, served_model(file, folder))
    assert "gemma4-head-dim" in {row.id for row in rank.command.advice}


def test_what_hangs_writes_where_into_the_folder_of_caches(tmp_path):
    facts = [node_facts(tmp_path, node=number, vllm="0.33.0") for number in (0, 1)]
    asked = '--watchdog-config {"dump_dir":"/home/spark/.local/state/patchkit/stacks","timeout":60}'
    assert asked in words(facts)
    assert "--watchdog-config" not in words(facts, unwanted=("watchdog",))


def test_variables_of_the_user_are_those_of_every_node(facts):
    file = cluster(*PAIR, set={"MY_OWN": "a $b"}, unwanted=("omp-threads",))
    ranks = planned_ranks(file, facts, served_model(file, MODEL))
    for rank in ranks:
        assert '\nMY_OWN="a \\$b"\n' in rank.text
    assert [rank.address for rank in ranks] == ["192.168.100.10", "192.168.100.11"]


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ({"vllm": ""}, "spark-2: ~/.local/share/patchkit/venv is not there"),
        ({"vllm": "0.24.0"}, "spark-2: vLLM 0.24.0 is installed here"),
        (
            {"node": 0},
            "spark-2: 192.168.100.10, the head's address, is this host's own",
        ),
    ],
)
def test_a_node_that_does_not_fit(second, says, facts, tmp_path):
    other = node_facts(tmp_path, **{"node": 1, **second})
    with pytest.raises(HostError) as caught:
        words([facts[0], other])
    assert caught.value.what.startswith(says)


def test_an_address_of_the_file_is_the_nodes_own(facts):
    file = cluster(*PAIR)
    head, worker = file.members
    for nodes, says in (
        (
            (replace(head, address="10.9.9.9"), worker),
            "1: 10.9.9.9 is no address of this host",
        ),
        (
            (head, replace(worker, address="10.0.0.11")),
            "2: 10.0.0.11 is not its address: it is re",
        ),
    ):
        with pytest.raises(HostError, match=f"^spark-{says}"):
            words(facts, file=replace(file, members=nodes))


def test_a_node_that_serves_alone_may_keep_its_address(facts):
    """One of another node is refused with those that it has."""
    (head, *_), own = cluster(*PAIR).members, "192.168.100.10"
    alone = replace(cluster("spark-1"), members=(replace(head, address=own),))
    assert words(facts[:1], file=alone)
    strange = replace(alone, members=(replace(head, address="10.9.9.9"),))
    with pytest.raises(HostError, match=f"10.9.9.9 is not its address: it has .*{own}"):
        words(facts[:1], file=strange)


@pytest.mark.parametrize(
    ("name", "nodes", "model", "says"),
    [
        ("cable_out", PAIR, MODEL, NO_CABLE),
        ("cable_port0", PAIR[:1], "Qwen/Qwen2.5-72B-Instruct", "2 nodes; or "),
        (
            "bond",
            PAIR,
            MODEL,
            'topology = "socket" in [serve], address = "192.168.100.10" in the head',
        ),
    ],
)
def test_a_hint_names_keys_of_the_file_and_no_flags(name, nodes, model, says, tmp_path):
    facts = [node_facts(tmp_path, name, node=number) for number in range(len(nodes))]
    with pytest.raises(HostError) as caught:
        words(facts, model, cluster(*nodes))
    assert says in caught.value.hint
    assert "--" not in caught.value.hint


@pytest.mark.parametrize(
    ("address", "triton", "says"),
    [
        ("10.9.9.9", "3.6.0", 'or name an address of this host: address = "ADDRESS"'),
        ("", "3.5.1", 'set = { TRITON_PTXAS_PATH = "VALUE" } in [serve]; or'),
        ("", "3.5.1", 'without = ["ptxas-old"] in [serve]'),
    ],
)
def test_a_hint_about_one_node_names_keys_of_the_file(address, triton, says, facts):
    head, worker = cluster(*PAIR).members
    members = (replace(head, address=address), worker)
    software = replace(facts[0].host.software, triton=triton)
    first = replace(facts[0], host=replace(facts[0].host, software=software))
    with pytest.raises(HostError) as caught:
        words(
            [replace(first, ptxas=""), *facts[1:]],
            file=replace(cluster(*PAIR), members=members),
        )
    assert says in caught.value.hint
    assert "--" not in caught.value.hint


def test_a_spark_and_a_thor_get_a_pipeline(facts, tmp_path):
    pair = [facts[0], node_facts(tmp_path, "thor", node=1, ptxas="/cuda/bin/ptxas")]
    assert "--pipeline-parallel-size 2" in words(pair, topology="hetero")


# Units


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
    assert ids("pair") != ids("pair-podman")


def test_a_folder_of_caches_for_each_model(facts):
    caches = "%h/.local/state/patchkit"
    graphs = set[str]()
    for model in (MODEL, "~/m/gpt", "/srv/m/gpt", "/srv/a b%h$/"):
        head = units_of(cluster(*PAIR, preset=MODEL), facts, model).node_files()[0]
        text = head["patchkit-vllm.service"]
        (state,) = re.findall(
            rf"^ExecStartPre=/usr/bin/mkdir -p {caches}/(vllm-0.25.1/models/[\w.-]+)$",
            text,
            re.MULTILINE,
        )
        assert f"VLLM_CACHE_ROOT={caches}/{state}/vllm " in text
        graphs.add(state)
    assert len(graphs) == 4
    assert "vllm-0.25.1/models/openai--gpt-oss-120b" in graphs


def test_words_are_written_as_systemd_reads_them():
    words = ["plain", "", "a b", 'say "$x"', "50%", "a\\b\n"]
    written = r'''plain "" "a b" "say \"$$x\"" 50%% "a\\b\x0a"'''
    assert unit_line(["/bin/vllm", *words]) == f"/bin/vllm {written}"


@pytest.mark.parametrize("path", [".", "./model", "../model"])
def test_a_path_in_the_current_folder_is_refused_with_the_whole_path(path):
    with pytest.raises(UsageError) as caught:
        served_model(cluster("spark-1"), path)
    assert str(Path(path).resolve()) in caught.value.hint


def test_a_folder_here_is_no_model_of_the_hub(tmp_path, monkeypatch):
    """Unless cluster.toml pins a model of that name, or it is the short name of a preset."""
    monkeypatch.chdir(tmp_path)
    for folder in ("models/x", "gpt-oss-120b"):
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(UsageError) as caught:
        served_model(cluster("spark-1"), "models/x")
    assert str(tmp_path / "models/x") in caught.value.hint

    pinned = replace(cluster("spark-1"), models={"models/x": COMMIT})
    assert served_model(pinned, "models/x").folder.startswith("~")
    assert served_model(cluster("spark-1"), "gpt-oss-120b").name == MODEL
    assert served_model(cluster("spark-1"), "o/" + "x" * 300).folder == ""


@pytest.mark.parametrize(
    ("model", "transformers", "says"),
    [
        (
            "nvidia/Gemma-4-26B-A4B-NVFP4",
            "5.15.0",
            "transformers 5.15.0 is installed here",
        ),
        ("nvidia/Gemma-4-26B-A4B-NVFP4", "5.14.1", ""),
        (
            "Qwen/Qwen2.5-72B-Instruct",
            "5.14.1",
            "does not fit: 136 GiB of weights per node",
        ),
    ],
)
def test_up_refuses_what_this_node_cannot_serve(model, transformers, says, tmp_path):
    made = node_facts(tmp_path, vllm="0.27.1")
    software = replace(made.host.software, transformers=transformers)
    facts = [replace(made, host=replace(made.host, software=software))]
    file = cluster("spark-1")
    if not says:
        (rank,) = planned_ranks(file, facts, served_model(file, model))
        assert rank.command.words[:3] == ("vllm", "serve", model)
        return
    with pytest.raises(HostError) as caught:
        planned_ranks(file, facts, served_model(file, model))
    assert says in caught.value.what
