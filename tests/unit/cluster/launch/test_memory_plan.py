"""What `up` does with the plan of a node's memory: flags, and refusals."""

from dataclasses import replace

import pytest

from patchkit.cluster.launch.ranks import planned_ranks, served_model
from patchkit.cluster.launch.start_plan import require_memory
from patchkit.errors import HostError
from patchkit.runtime.host.host import Memory
from patchkit.units import KIB_PER_GIB
from support.clusters import MODEL, cluster, model, node_facts, state, unit
from unit.runtime.memory.test_plan import KINDS, checkpoint_of

FOLDER = "/home/spark/models/m"
STOPPED = {"found": unit(active="inactive", sub="dead"), "processes": ()}


def facts_with(folder, available, **changes):
    made = node_facts(folder)
    memory = Memory(total=121 * KIB_PER_GIB, available=available * KIB_PER_GIB)
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


@pytest.mark.parametrize(
    ("available", "changes", "says"),
    [
        (110, STOPPED, ""),
        (20, STOPPED, "needs 65 GiB, .*, and 20 are free"),
        (20, STOPPED | {"others": {"chat": True}}, "needs 65 GiB"),
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
