"""Judge the answers of real servers: of a tiny model that e2e/proofs/tiny_model.py trained."""

import json
import math
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from patchkit.cli.cluster.cluster_options import cluster_here
from patchkit.cli.cluster.serve import _answered_blocks
from patchkit.cluster.agent.fingerprint import keep_fingerprint, last_judgement
from patchkit.cluster.launch.cluster_file import ServeChoices
from patchkit.cluster.openai.server_answers import (
    FoundServer,
    ModelAnswers,
    _describe_start,
    _numbers,
    _read_template,
    ask_model,
    server_at,
)
from patchkit.cluster.ssh.answer import encoded
from patchkit.cluster.ssh.node import Remote
from patchkit.doctor.answer_check import check_answers
from patchkit.doctor.answers import (
    AnswerCase,
    answer_findings,
    back_command,
    choose_former,
    find_back_ends,
    fingerprint,
)
from patchkit.finding import Level
from patchkit.records import RECIPES, read_json, read_toml
from support.model_server import ModelServer

DATA = Path(__file__).parents[2] / "data" / "answers"
AGAIN = "patchkit doctor --answers"


def recorded(name):
    return read_json(ModelAnswers, (DATA / f"{name}.json").read_text())


def case(answers, former=None, log=()):
    return AnswerCase(answers=answers, former=former, again=AGAIN, log=log)


def kept(answers, **changes):
    findings = answer_findings("spark-1", case(answers))
    made = fingerprint(case(answers), findings, 1.8e9)
    parts = {**made.start.parts, **changes}
    start = replace(made.start, parts=parts, cluster="vllm")
    return replace(made, start=start)


def about(findings, *levels):
    return {each.about for each in findings if each.level in levels}


# What answer_faults.py did to the model → what is found against the healthy start.
FOUND = {
    "healthy": set(),
    "fp4": {"answers-far"},
    "swap": {"answers-moved", "answers-marks"},
    "noise": {"answers-moved", "answers-marks"},
    "rope": {"answers-moved", "answers-fact", "answers-tool"},
    "stale": {"answers-steps", "answers-marks"},
    "nan": {"answers-failed", "answers-fact", "answers-chat", "answers-tool"},
}


@pytest.mark.parametrize("name", FOUND)
def test_real_answers(name):
    former = kept(recorded("healthy"))
    findings = answer_findings("spark-1", case(recorded(name), former))
    assert about(findings, Level.ERROR, Level.WARNING) == FOUND[name]


def moved_by(answers, **shifts):
    """Return answers whose chances are moved by some nats a token, by the kind of the question."""
    replies = [
        replace(
            reply,
            logprobs=tuple(
                each - shifts.get(reply.about, 0) for each in reply.logprobs
            ),
        )
        for reply in answers.replies
    ]
    return replace(answers, replies=tuple(replies))


@pytest.mark.parametrize(
    ("flags", "shift", "found"),
    [
        ("", 0.06, "drift"),
        ("", 0.2, "far"),
        ("", 0.55, "moved"),
        ("--max-num-seqs 8", 0.2, "far"),
        ("--quantization fp8", 0.28, "drift"),
        ("--kv-cache-dtype=fp8", 0.55, "far"),
        ("--moe-backend marlin", 0.65, "moved"),
    ],
)
def test_another_format_may_move_the_answers_farther(flags, shift, found):
    healthy = recorded("healthy")
    answers = moved_by(healthy, passage=shift, again=shift)
    findings = answer_findings("spark-1", case(answers, kept(healthy, flags=flags)))
    assert about(findings, Level.ERROR, Level.WARNING, Level.NOTE) == {
        f"answers-{found}"
    }


def measured(file):
    """Yield runs on GPUs: kind, findings against the healthy start, distances by their names."""
    for line in (DATA / file).read_text().splitlines():
        kind, _detail, _first, later, figures = line.split("\t")
        words = figures.partition(";")[0].split()
        yield kind, later, dict(zip(words[::2], map(float, words[1::2]), strict=True))


# Runs of answers_on_gpu.py: a trained mixture of experts, and SmolLM2-135M-Instruct, a real model.
@pytest.mark.parametrize(("file", "runs"), [("gpu.tsv", 75), ("smollm2.tsv", 79)])
def test_bounds_part_what_gpus_measured(file, runs):
    healthy = recorded("healthy")
    judged = list(measured(file))
    assert len(judged) == runs
    for kind, later, gaps in judged:
        shift = gaps.get("moved", gaps.get("formats"))
        shifts = {"passage": shift, "again": shift, "steps": gaps.get("steps", 0)}
        flags = "--quantization fp8" if "formats" in gaps else ""
        answers = moved_by(healthy, **shifts, cold=gaps.get("cache", 0))
        findings = answer_findings("spark-1", case(answers, kept(healthy, flags=flags)))

        by_distance = {"moved", "far", "cache", "cache-doubt", "steps", "steps-doubt"}
        expected = {part for part in later.split() if part.split(":")[0] in by_distance}
        accusations = {
            f"{each.about.removeprefix('answers-')}:{each.level}"
            for each in findings
            if each.about.removeprefix("answers-") in by_distance
        }
        assert accusations == expected, (kind, gaps)
        if kind in ("healthy", "fp8", "w4a4"):
            assert about(findings, Level.ERROR) == set()


def test_a_healthy_start_says_its_perplexity_and_where_it_was():
    healthy = recorded("healthy")
    findings = answer_findings("spark-1", case(healthy, kept(healthy)))
    right = {each.about: each.what for each in findings}["answers-right"]
    figure = right.split()[1]
    assert right.startswith(f"perplexity {figure} → {figure} (english ")
    assert right.endswith("; 8 of 8 facts; 2 s")


def test_garbage_names_the_back_ends_and_the_way_back():
    healthy = recorded("healthy")
    replies = []
    for reply in healthy.replies:
        chances = tuple(each * 3 for each in reply.logprobs)
        is_right = reply.is_right and reply.about != "fact"
        replies.append(replace(reply, logprobs=chances, is_right=is_right))
    log = [
        "INFO [cuda.py:509] Using FLASH_ATTN attention backend out of potential backends: [].",
        "INFO Using 'MARLIN' NvFp4 MoE backend out of potential backends: ['MARLIN'].",
        "INFO Using FlashInferCutlassNvFp4LinearKernel for NVFP4 GEMM",
    ]
    venv = "/home/spark/.local/share/patchkit/venvs/0123456789ab"
    former = kept(healthy, vLLM="0.24.0+patchkit1", installation=venv)
    findings = answer_findings(
        "spark-1", case(replace(healthy, replies=tuple(replies)), former, log)
    )
    garbage = {each.about: each for each in findings}["answers-garbage"]
    assert "0 of 8 facts" in garbage.what
    assert (
        "FLASH_ATTN attention backend, 'MARLIN' NvFp4 MoE backend, "
        "FlashInferCutlassNvFp4LinearKernel" in garbage.why
    )
    assert (
        garbage.hint
        == "patchkit cluster install --wheelhouse wheelhouse-0.24.0 && patchkit up tiny"
    )


@pytest.mark.parametrize("facts", [0, 2])
def test_garbage_without_enough_facts_is_no_right_answer(facts):
    healthy = recorded("healthy")
    number = 0
    replies = []
    for reply in healthy.replies:
        if reply.about == "fact":
            number += 1
            refusal = "no time was left" * (number > facts)
            reply = replace(reply, is_right=False, refusal=refusal)
        replies.append(replace(reply, logprobs=(-1e5,) * len(reply.logprobs)))

    garbage = replace(healthy, replies=tuple(replies))
    findings = answer_findings("spark-1", case(garbage))
    (doubtful,) = (each for each in findings if each.level is Level.WARNING)
    assert doubtful.about == "answers-doubtful"
    assert "perplexity > 1e6 (english > 1e6, " in doubtful.what
    assert f"; 0 of {facts} facts" in doubtful.what
    assert not kept(garbage).is_right


def test_another_tokenizer_and_changed_flags():
    healthy = recorded("healthy")
    former = kept(healthy, flags="vllm serve tiny --moe-backend marlin")
    former = replace(former, logprobs={"english": (-1.0,)})
    findings = answer_findings("spark-1", case(healthy, former))
    (moved,) = (each for each in findings if each.about == "answers-moved")
    assert "flags [vllm serve tiny --moe-backend marlin] → []" in moved.why
    assert moved.hint.startswith("patchkit up tiny; if you meant to change it: ")


def test_a_refused_passage_is_not_compared():
    healthy = recorded("healthy")
    first, *others = healthy.replies
    refused = replace(first, logprobs=(), refusal="no time was left")
    partial = replace(healthy, replies=(refused, *others))
    former = kept(healthy)

    assert (former.is_right, kept(partial).is_right) == (True, False)
    for answers, other in ((partial, former), (healthy, kept(partial))):
        findings = answer_findings("spark-1", case(answers, other))
        assert about(findings, Level.ERROR, Level.WARNING) == set()


@pytest.mark.parametrize(("chance", "found"), [(0.55, set()), (0.9, {"answers-flip"})])
def test_a_token_that_the_cache_turns(chance, found):
    healthy = recorded("healthy")
    replies = []
    for reply in healthy.replies:
        if reply.about == "cold":
            tokens = (*reply.tokens[:3], "other", *reply.tokens[4:])
            chances = (*reply.logprobs[:3], math.log(chance), *reply.logprobs[4:])
            reply = replace(reply, tokens=tokens, logprobs=chances)
        replies.append(reply)

    turned = replace(healthy, replies=tuple(replies))
    findings = answer_findings("spark-1", case(turned))
    assert about(findings, Level.ERROR, Level.WARNING) == found


def test_the_former_of_the_same_start_comes_first():
    healthy = recorded("healthy")
    same, newer = kept(healthy), kept(healthy, vLLM="0.1")
    healthy = replace(healthy, start=same.start)
    assert choose_former(replace(healthy, former=(newer, same))) == same
    assert choose_former(replace(healthy, former=(newer,))) == newer
    assert choose_former(healthy) is None
    assert back_command(same, healthy.start) == "patchkit doctor --gpu"
    by_pip = kept(healthy, vLLM="0.24.0", installation="/home/spark/.venv")
    assert back_command(by_pip, healthy.start) == (
        "/home/spark/.venv/bin/pip install wheelhouse-0.24.0/vllm-*.whl && patchkit up tiny"
    )


def test_a_node_that_lies_about_chances_and_parts():
    healthy = recorded("healthy")
    replies = [
        replace(reply, id="x", tokens=("a",), logprobs=(1e308,) * len(reply.logprobs))
        for reply in healthy.replies
    ]
    former = kept(healthy)
    start = replace(former.start, parts={})
    former = replace(former, start=start, logprobs={"x": (-1.0,)})
    findings = answer_findings(
        "spark-1", case(replace(healthy, replies=tuple(replies)), former)
    )
    assert "answers-moved" in about(findings, Level.ERROR)


def test_a_fingerprint_with_chances_that_no_model_gives():
    healthy = recorded("healthy")
    former = kept(healthy)
    chances = {name: (-1e308,) * len(row) for name, row in former.logprobs.items()}
    findings = answer_findings(
        "spark-1", case(healthy, replace(former, logprobs=chances))
    )
    assert about(findings, Level.ERROR) == {"answers-moved"}


def test_find_back_ends_in_a_log_without_any():
    assert find_back_ends(["Using model weights format", "no line"]) == "no back end"


WEIGHTS = {  # the folder of `up`, or else the root of /v1/models → what is compared
    ("", f"/hub/models--a--b/snapshots/{'0a' * 20}"): "0a" * 20,
    ("/home/spark/models/org--a@0123456789ab", "/model"): "0123456789ab",
    ("/home/spark/models/a", "/model"): "/home/spark/models/a",
    ("", "org/a"): "org/a",
    ("", ""): "",
}


@pytest.mark.parametrize(("folder", "root"), WEIGHTS)
def test_weights_are_told_by_commit_or_else_by_folder(folder, root):
    with ModelServer(models=("tiny",)) as server:
        started = {"folder": folder} if folder else {}
        found = FoundServer(
            server=server_at(server.url, ""), started=started, key="", strangers=()
        )
        start = _describe_start(found, "tiny", folder or root)
    assert start.commit == WEIGHTS[folder, root]


TEMPLATES = {  # of vLLM's examples → the parsers that its own pages name for it
    "apertus": ("apertus",),
    "deepseekv3": ("deepseek_v3",),
    "deepseekv31": ("deepseek_v31",),
    "functiongemma": ("functiongemma",),
    "gemma3_pythonic": ("pythonic",),
    "gemma4": ("gemma4",),
    "granite": ("granite",),
    "granite_20b_fc": ("granite-20b-fc",),
    "hermes": ("hermes",),
    "hunyuan_a13b": ("hunyuan_a13b",),
    "internlm2_tool": ("internlm",),
    "llama3.1_json": ("llama3_json",),
    "llama3.2_pythonic": ("pythonic",),
    "llama4_pythonic": ("llama4_pythonic",),
    "mistral": ("mistral",),
    "phi4_mini": ("phi4_mini_json",),
    "qwen3coder": ("qwen3_coder", "qwen3_xml"),
    "toolace": ("pythonic",),
    "xlam_qwen": ("xlam",),
}


def served(template, *flags):
    """Return healthy answers of a model with this template, started with these flags."""
    healthy = recorded("healthy")
    parts = {**healthy.start.parts, "flags": f"vllm serve tiny {' '.join(flags)}"}
    start = replace(healthy.start, parts=parts)
    return replace(healthy, start=start, template=template)


@pytest.fixture(scope="module")
def examples(release):
    return release("0.33.0") / "examples"


@pytest.mark.parametrize("name", TEMPLATES)
def test_parsers_read_the_templates_that_vllm_has_for_them(examples, name):
    template = (examples / f"tool_chat_template_{name}.jinja").read_text()
    for parser in TEMPLATES[name]:
        answers = served(template, "--tool-call-parser", parser)
        assert about(answer_findings("here", case(answers)), Level.WARNING) == set()


@pytest.mark.parametrize(
    ("name", "flags", "mark"),
    [
        ("hermes", "--tool-call-parser pythonic", "<tool_call>"),
        ("hermes", "--tool-call-parser=qwen3_coder", "<tool_call>"),
        ("qwen3coder", "--tool-call-parser hermes", "<function="),
        ("mistral", "--tool-call-parser hermes", "[TOOL_CALLS]"),
        ("deepseekv31", "--tool-call-parser kimi_k2", "<｜tool▁calls▁begin｜>"),
        ("hermes", "--chat-template x.jinja --tool-call-parser pythonic", ""),
        ("hermes", "--tool-call-parser pythonic --chat-template=x.jinja", ""),
        ("hermes", "--tool-call-parser of_a_plugin", ""),
        ("hermes", "--enable-prefix-caching", ""),
        ("llama3.1_json", "--tool-call-parser hermes", ""),
    ],
)
def test_a_parser_that_does_not_read_the_template(examples, name, flags, mark):
    template = (examples / f"tool_chat_template_{name}.jinja").read_text()
    findings = answer_findings("here", case(served(template, flags)))
    accusations = [each for each in findings if each.level is Level.WARNING]
    assert [each.about for each in accusations] == ["answers-parser"] * bool(mark)
    for each in accusations:
        assert f"writes {mark}, which --tool-call-parser" in each.what
        assert each.hint.endswith(f", then: {AGAIN}")


def test_parsers_of_the_table_are_those_of_the_release(release):
    registered = (release("0.25.1") / "vllm/tool_parsers/__init__.py").read_text()
    kind = dict[str, tuple[str, ...]]
    table = read_toml(kind, RECIPES / "answers" / "bounds.toml", key="calls")
    parsers = {parser for readers in table.values() for parser in readers}
    assert {each for each in parsers if f'"{each}": (' not in registered} == set()


def test_the_template_of_a_folder(tmp_path):
    settings = tmp_path / "tokenizer_config.json"
    assert _read_template(str(tmp_path)) == ""
    assert _read_template("org/a\0") == ""

    several = [{"name": "tool_use", "template": "<｜tool▁calls▁begin｜>\ud800"}]
    settings.write_text(json.dumps({"chat_template": several}))
    assert "<｜tool▁calls▁begin｜>" in _read_template(str(tmp_path))
    assert "\ud800" not in _read_template(str(tmp_path))

    for spoiled in ("[]", "{", '{"chat_template": null}'):
        settings.write_text(spoiled)
        assert _read_template(str(tmp_path)) in ("", "None")

    settings.write_text(json.dumps({"chat_template": "<tool_call>"}))
    assert _read_template(str(tmp_path)) == "<tool_call>"
    (tmp_path / "chat_template.jinja").write_text("[TOOL_CALLS]" + "x" * (1 << 17))
    text = _read_template(str(tmp_path))
    assert (text[:12], len(text)) == ("[TOOL_CALLS]", 1 << 16)


def test_a_certain_token_may_have_a_little_more_than_certainty():
    chances = list(_numbers([1e-7, -0.5, 0.1, "x", float("nan"), float("inf")]))
    assert chances == [0, -0.5, *[-1e5] * 4]


HOSTILE = {  # what a server sends → what is not asked, or fails
    "no JSON": (b"[]", "no answer of the OpenAI API"),
    "other types": (
        b'{"choices":[{"text":"x","prompt_logprobs":[null,{"1":5}]}]}',
        "an answer of another form",
    ),
    "NaN": (
        b'{"choices":[{"text":"x","prompt_logprobs":[{"1":{"logprob":NaN}}]}]}',
        "no answer of the OpenAI API",
    ),
    "numbers of tokens": (
        b'{"choices":[{"text":"x","token_ids":["a"]}]}',
        "an answer of another form",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_server(name, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    raw, said = HOSTILE[name]
    with ModelServer(raw=raw) as server:
        answers = Remote("localhost").call(ModelAnswers, ask_model, url=server.url)
    (found,) = answer_findings("spark-1", case(answers))
    assert (found.level, found.about) == (Level.UNKNOWN, "answers-unasked")
    assert said in found.what


STATUSES = {  # the status, and the questions that have it → the finding
    (501, ""): (Level.NOTE, "answers-unserved"),
    (404, "passage"): (Level.NOTE, "answers-unserved"),
    (400, "chat"): (Level.NOTE, "answers-unserved"),
    (500, "chat"): (Level.WARNING, "answers-template"),
    (500, "fact"): (Level.ERROR, "answers-failed"),
    (401, ""): (Level.UNKNOWN, "answers-unasked"),
}


@pytest.mark.parametrize(("status", "kind"), STATUSES)
def test_a_refusal_by_its_status(status, kind):
    healthy = recorded("healthy")
    replies = [
        replace(reply, status=status, refusal="no", is_right=False)
        if kind in reply.about
        else reply
        for reply in healthy.replies
    ]
    answers = replace(healthy, replies=tuple(replies))
    findings = answer_findings("spark-1", case(answers))
    (found,) = (each for each in findings if each.level is not Level.OK)
    assert (found.level, found.about) == STATUSES[status, kind]


def test_a_server_whose_chances_are_no_numbers(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    error = {"error": {"message": "Out of range float values are not JSON compliant"}}
    with ModelServer(refuse=(500, error)) as server:
        answers = Remote("localhost").call(ModelAnswers, ask_model, url=server.url)
    (found,) = answer_findings("spark-1", case(answers))
    assert (found.level, found.about) == (Level.ERROR, "answers-failed")


def test_the_check_asks_judges_and_keeps(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    with ModelServer(models=("tiny",)) as server:
        port = int(server.url.rpartition(":")[2])
        findings = check_answers(cluster_here(), port=port)
        served = cluster_here(serve=ServeChoices(port=port))
        assert check_answers(served) != []  # nothing was started: the default port
    assert about(findings, Level.WARNING) == {
        f"answers-{kind}" for kind in ("fact", "chat", "tool", "needle")
    }
    (hint,) = (each.hint for each in findings if each.about == "answers-chat")
    assert hint.endswith(f", then: patchkit doctor --answers --port {port}")
    assert last_judgement("", "tiny") != ""

    (silent,) = check_answers(cluster_here(), port=port)
    assert (silent.level, silent.about) == (Level.UNKNOWN, "answers")


def test_a_model_that_served_before_is_left_to_its_users():
    blocks = list(_answered_blocks(cluster_here(), "tiny", "", ""))
    assert {"answers": []} in blocks
    assert f"answers: not asked again; to ask: {AGAIN}" in blocks


def test_a_home_that_takes_no_file(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".local").write_text("")
    with ModelServer(models=("tiny",)) as server:
        port = int(server.url.rpartition(":")[2])
        findings = check_answers(cluster_here(), port=port)
    unkept = findings[-1]
    assert (unkept.level, unkept.about) == (Level.NOTE, "answers-unkept")
    assert f"{tmp_path}/.local" in unkept.what
    assert len(findings) > 1


def test_fingerprints_are_kept_and_read(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    healthy = recorded("healthy")
    start = replace(healthy.start, cluster="vllm")
    made = replace(kept(healthy), start=start, summary="perplexity 3.00")
    file = tmp_path / ".local/share/patchkit/answers/fingerprints.json"

    for number in range(20):
        other = replace(start, parts={**start.parts, "vLLM": f"0.{number}"})
        keep_fingerprint(json.loads(encoded(replace(made, start=other))))
    assert len(json.loads(file.read_text())) == 16
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert last_judgement("vllm", "tiny").endswith(" perplexity 3.00")
    assert last_judgement("other", "tiny") == ""

    with ModelServer(models=("tiny",)) as server:
        assert len(ask_model(server.url).former) == 16

    for spoiled in ("[", "[1]", '[{"time": 1e999}]', "x" * (3 << 20)):
        file.write_text(spoiled)
        assert last_judgement("vllm", "tiny") == ""
    keep_fingerprint(json.loads(encoded(made)))
    assert len(json.loads(file.read_text())) == 1
