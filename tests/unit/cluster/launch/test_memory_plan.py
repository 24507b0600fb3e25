"""What `up` does with the plan of a node's memory: flags, and refusals."""

import json
from dataclasses import replace

import pytest

from patchkit.cluster.launch.ranks import planned_ranks, served_model
from patchkit.cluster.launch.start_plan import require_guards, require_memory
from patchkit.errors import HostError
from patchkit.frozen import plain_fields
from patchkit.records import read_json
from patchkit.runtime.host.host import Memory
from patchkit.runtime.memory.checkpoint import Checkpoint
from patchkit.units import KIB_PER_GIB
from support.clusters import (
    MODEL,
    cluster,
    model,
    node_facts,
    state,
    unit,
    units_of,
)
from unit.runtime.memory.test_plan import KINDS, checkpoint_of

FOLDER = "/home/spark/models/m"
STOPPED = {"found": unit(active="inactive", sub="dead"), "processes": ()}


def facts_with(folder, available, total=121, node=0, **changes):
    made = node_facts(folder, node=node)
    memory = Memory(total=total * KIB_PER_GIB, available=available * KIB_PER_GIB)
    return replace(made, host=replace(made.host, memory=memory), **changes)


def ranks_for(file, facts, name=MODEL):
    return planned_ranks(file, [facts], served_model(file, name))


@pytest.mark.parametrize("length", ["", "8192", "99999999"])
def test_a_checkpoint_on_the_node_is_planned(tmp_path, length):
    row = KINDS["llama8b"]
    size = round(row["weights"])
    there = model(weights=size, checkpoint=checkpoint_of(row))
    facts = facts_with(tmp_path, 110, models={FOLDER: there})
    file = cluster("spark-1", args=("--max-model-len", length) if length else ())

    if length == "99999999":
        with pytest.raises(HostError, match="a context of 99,999,999 tokens does not"):
            ranks_for(file, facts, FOLDER)
        return

    (rank,) = ranks_for(file, facts, FOLDER)
    plan = rank.command.plan
    assert plan.is_whole
    assert plan.longest_context == int(length or 131072)
    words = rank.command.words
    planned = int(words[words.index("--kv-cache-memory-bytes") + 1])
    assert planned == pytest.approx(plan.cache_gib * 2**30, abs=2**20)
    assert "memory_floor" in [row.source for row in plan.outside]


ROW = KINDS["llama8b"]
THERE = {FOLDER: model(weights=9131303424, checkpoint=checkpoint_of(ROW))}
SHARE = "--gpu-memory-utilization"
BYTES = "--kv-cache-memory-bytes"


@pytest.mark.parametrize(
    ("args", "flags", "cache"),
    [
        (["--max-model-len=8k"], {"--max-model-len": "8000"}, 86.2),
        (["--max_model_len", "16K"], {"--max-model-len": "16384"}, 86.2),
        (["--max-model-len", "25.6k"], {"--max-model-len": "25600"}, 86.2),
        (["--max-model-len", "-1"], {}, 86.2),
        (["--max-model-len", "4096", "--max-model-len", "auto"], {}, 86.2),
        ([SHARE, "0.4"], {BYTES: "37.8"}, 37.8),
        ([f"{SHARE}=2"], {BYTES: "86.2"}, 86.2),
        ([BYTES, "20G"], {BYTES: None}, 20),
        (["-tp", "2", "--speculative-config", "["], {BYTES: "91.1"}, 91.1),
    ],
)
def test_what_args_ask_for_is_planned(tmp_path, args, flags, cache):
    file = cluster("spark-1", args=tuple(args))
    units = units_of(file, [facts_with(tmp_path, 110, models=THERE)], FOLDER)
    (rank,) = units.ranks
    assert rank.command.plan.cache_gib == pytest.approx(cache, abs=0.3)
    settings = units._node_settings(rank, {})
    plan = rank.command.plan
    needs = {"takes": plan.held_gib, "free": plan.share_gib}
    assert settings["memory"] == needs
    beside = 10.3 if "-tp" in args else 15.2
    assert plan.held_gib - plan.cache_gib == pytest.approx(beside, abs=0.3)
    flag, value, contexts = settings["cache"]
    assert (flag, value / 2**30) == (BYTES, pytest.approx(cache, abs=0.3))
    longest = rank.command.plan.longest_context
    bytes_of_one = rank.command.plan.request_gib(longest) * 2**30
    assert contexts[0] == (bytes_of_one, f" --max-model-len {longest}")
    assert min(longest, 8192) <= int(contexts[-1][1].split()[1]) <= max(8192, 16384)
    words = dict(zip(rank.command.words, rank.command.words[1:], strict=False))
    for name, value in flags.items():
        if name == BYTES and value:
            assert int(words[name]) / 2**30 == pytest.approx(float(value), abs=0.3)
        else:
            assert words.get(name) == value


@pytest.mark.parametrize(
    ("args", "says", "hint"),
    [
        (
            ("--max-model-len", "99G"),
            "does not fit the model: .* 131,072",
            '-len", "131',
        ),
        # Positions that are scaled may be more than the config says.
        (
            ("--max-model-len", "99G", "--hf-overrides", "{}"),
            "a context of .* does not fit: its cache",
            '-len", "',
        ),
        ((BYTES, "200G"), "does not fit: 9 GiB of weights .* room for 0", "take "),
    ],
)
def test_what_args_ask_for_may_not_fit(tmp_path, args, says, hint):
    file = cluster("spark-1", args=args)
    with pytest.raises(HostError, match=says) as caught:
        ranks_for(file, facts_with(tmp_path, 110, models=THERE), FOLDER)
    assert hint in caught.value.hint
    assert "--ctx" not in caught.value.hint


@pytest.mark.parametrize(("sequences", "is_noted"), [("64", False), ("2k", True)])
def test_more_requests_than_the_cache_holds_are_noted(tmp_path, sequences, is_noted):
    file = cluster("spark-1", args=("--max-num-seqs", sequences, BYTES, "1G"))
    (rank,) = ranks_for(file, facts_with(tmp_path, 110, models=THERE), FOLDER)
    said = [note for note in rank.command.notes if "has room for" in note]
    assert bool(said) is is_noted
    assert all(note.startswith("--max-num-seqs 2000: the") for note in said)


@pytest.mark.parametrize("folder", ["/d/eagle", "/d/other", "org/eagle"])
def test_a_drafter_in_args_is_weighed(tmp_path, folder):
    """If it lies in a folder: nobody knows what vLLM would download."""
    drafting = json.dumps({"method": "eagle3", "model": folder})
    file = cluster("spark-1", args=("--speculative-config", drafting))
    there = THERE | {"/d/eagle": model(weights=2 << 30)}
    (rank,) = ranks_for(file, facts_with(tmp_path, 110, models=there), FOLDER)
    sizes = [row.gib for row in rank.command.plan.rows if row.name == "drafter"]
    assert sizes == ([2] if folder == "/d/eagle" else [])


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {}},
        {"config": {"model_type": ["x"], "architectures": 5, "num_experts": -1}},
        {"architectures": ["LlamaForCausalLM"], "tensors": []},
        {"reads": -1, "largest_file": -5},
    ],
)
def test_a_node_may_send_any_checkpoint(tmp_path, changes):
    plain = json.loads(json.dumps(checkpoint_of(ROW), default=plain_fields))
    sent = read_json(Checkpoint, json.dumps(plain | changes))
    facts = facts_with(tmp_path, 110, models={FOLDER: model(checkpoint=sent)})
    (rank,) = ranks_for(cluster("spark-1"), facts, FOLDER)
    assert rank.command.words[:2] == ("vllm", "serve")


@pytest.mark.parametrize("device", ["", "thor"])
def test_all_ranks_are_planned_for_the_smallest_node(tmp_path, device):
    """Also where the smallest one is another device."""
    args = ("--max-model-len", "8192", SHARE, "1")
    file = cluster("spark-1", "spark-2", args=args)
    spark = facts_with(tmp_path, 110, models=THERE)
    other = facts_with(tmp_path, 110, 119, 1, models=THERE)
    if device:
        file = replace(file, serve=replace(file.serve, topology="hetero"))
        thor = node_facts(tmp_path, "thor", node=1).host
        host = replace(thor, memory=other.host.memory)
        other = replace(other, host=host, ptxas="/cuda/bin/ptxas")
    facts = [spark, other]
    ranks = planned_ranks(file, facts, served_model(file, FOLDER))
    head, worker = (rank.command for rank in ranks)
    assert head.plan == worker.plan
    assert head.plan.pool.gib == 119


@pytest.mark.parametrize(
    ("available", "args", "says"),
    [
        (110, (), ""),
        (90, (), "takes 101 GiB, and 90 are free"),
        (90, (SHARE, "0.70"), ""),
        (90, (BYTES, "80G"), "takes 97 GiB"),
        (14, (), "needs 15 GiB, even with a short context, and 14 are free"),
    ],
)
def test_vllm_takes_its_share_at_once(tmp_path, available, args, says):
    file = cluster("spark-1", args=args)
    ranks = ranks_for(file, facts_with(tmp_path, available, models=THERE), FOLDER)
    states = [state(**STOPPED)]
    if not says:
        require_memory(file, ranks, states)
        return
    with pytest.raises(HostError, match=says) as caught:
        require_memory(file, ranks, states)
    hint = f'"{SHARE}", "0.70" in `args`'
    assert (hint in caught.value.hint) is (available == 90 and not args)


def test_a_guard_that_could_end_nothing_is_refused_unless_it_is_off(tmp_path):
    facts = [facts_with(tmp_path, 110, unified_groups=False)]
    with pytest.raises(HostError, match="spark-1: control groups are of version 1"):
        require_guards(units_of(cluster("spark-1"), facts, MODEL))
    require_guards(units_of(cluster("spark-1", memory_floor=0.0), facts, MODEL))


def test_a_former_start_is_no_reason_to_check_nothing_elsewhere(tmp_path):
    """Its node alone is not checked, and that is said."""
    file = cluster("spark-1", "spark-2")
    facts = [facts_with(tmp_path, 20, node=node) for node in range(2)]
    ranks = planned_ranks(file, facts, served_model(file, MODEL))
    left = state(**STOPPED | {"processes": (7,)})
    with pytest.raises(HostError, match=r"spark-2: the model needs .* and 20 are free"):
        require_memory(file, ranks, [left, state(**STOPPED)])

    note = "spark-1: its free memory was not checked: processes are left: 7, and is"
    said, _other = require_memory(file, ranks, [left, left])
    assert said.startswith(note)


@pytest.mark.parametrize(
    ("available", "changes", "says"),
    [
        (110, STOPPED, ""),
        (20, STOPPED, "needs 65 GiB, .*, and 20 are free"),
        (20, STOPPED | {"others": {"chat": True}}, "needs 65 GiB"),
        (
            110,
            STOPPED | {"others": {"chat": True}, "to_come": 50.0},
            "60 are free once",
        ),
        (20, {}, ""),  # its own former start is stopped first
    ],
)
def test_a_second_model_needs_room_beside_the_first(tmp_path, available, changes, says):
    file = cluster("spark-1")
    facts = facts_with(tmp_path, available)
    ranks = ranks_for(file, facts)
    states = [state(**changes)]
    if not says:
        require_memory(file, ranks, states)
        return

    with pytest.raises(HostError, match=says) as caught:
        require_memory(file, ranks, states)
    if changes.get("others"):
        assert "the cluster chat serves there" in caught.value.why
        assert "disable --now patchkit-chat.service" in caught.value.hint
    else:
        assert "page cache counts as free" in caught.value.why


@pytest.mark.parametrize("extra", [{}, {"index_head_dim": 128}])
def test_a_start_writes_down_what_bounds_its_speed(tmp_path, extra):
    """The weights that a token reads, the cache if all of it is read, the bandwidth."""
    checkpoint = checkpoint_of(ROW)
    config = {**checkpoint.config, **extra}
    there = replace(
        THERE[FOLDER], checkpoint=replace(checkpoint, config=config, reads=5e9)
    )
    facts = facts_with(tmp_path, 110, models={FOLDER: there})
    units = units_of(cluster("spark-1"), [facts], FOLDER)
    weights, cache, bandwidth = json.loads(units.node_files()[0]["group.json"])["speed"]
    assert (weights, bandwidth) == (5e9, 273e9)
    assert cache == (0 if extra else units.ranks[0].command.plan.cache_gib * 2**30)
