"""Ask a running server, in the shapes of several releases, and judge what it says."""

import json

import pytest

from patchkit.cluster.agent.judge import ANSWERS, DOUBT, LIVES, REFUSES
from patchkit.cluster.openai.server_answers import ServerAnswers, ask_server
from patchkit.cluster.ssh.node import Remote
from patchkit.doctor.server import server_findings
from patchkit.finding import Level
from support import clusters, write_files
from support.model_server import LABELS, REASONING, VERSIONS, ModelServer, metrics

SECRET = "kkk-very-secret-kkk"


def looked(server, **given):
    """Return what `ask_server` returns, on the way that doctor takes."""
    url = server if isinstance(server, str) else server.url
    given = {"key_file": "/nonexistent", "seconds": 2.0} | given
    return Remote("localhost").call(ServerAnswers, ask_server, url=url, **given)


def judged(said):
    return {each.about: each for each in server_findings("spark-1", said, ())}


@pytest.mark.parametrize("release", REASONING)
def test_a_server_that_works(release):
    with ModelServer(release, reasoning="I think about it.") as server:
        said = looked(server)
    assert said.version == VERSIONS[release]
    assert said.models == ("small",)
    assert said.token.fields == tuple(sorted(("content", *REASONING[release])))
    assert (said.token.finish, said.token.tokens) == ("stop", 5)
    assert said.figures["kv-usage"] == 0.25
    found = judged(said)
    assert found["server-token"].level is Level.OK
    assert VERSIONS[release] in found["server-token"].what
    assert " and ".join(sorted(REASONING[release])) in found["server-reasoning"].what
    assert {each.level for each in found.values()} == {Level.OK, Level.NOTE}


def test_no_server():
    with ModelServer() as server:
        url = server.url
    (found,) = server_findings(
        "spark-1", looked(url), [clusters.unit("failed", "failed")]
    )
    assert (found.level, found.about) == (Level.UNKNOWN, "server-answers")
    expected = f"no server answers at {url}: Connection refused; patchkit-vllm.service is failed"
    assert (found.what, found.hint) == (expected, "patchkit status")


FULL = {"usage": 0.991, "waiting": 12, "running": 8}
WRONG = {  # what the server does → what is found, at which level, and words of it
    "dead": ({"health": 503}, "server-health-dead", Level.ERROR, "EngineDeadError"),
    "odd": ({"health": 404}, "server-health", Level.WARNING, "404"),
    "silent": ({"silent": True}, "server-token-none", Level.ERROR, "no answer in 2 s"),
    "busy": (
        {"silent": True, "metrics": metrics("0.33", **FULL)},
        *("server-token-queue", Level.WARNING, "8 requests run, 12 wait"),
    ),
    "full": (
        {"metrics": metrics("0.33", **FULL)},
        "server-kv",
        Level.WARNING,
        "99 % full, and 12",
    ),
    "key": ({"key": SECRET}, "server-key", Level.UNKNOWN, "401"),
    "no model": ({"models": ()}, "server-models", Level.UNKNOWN, "200"),
    "embeds": (
        {"refuse": (400, {"error": {"message": "does not support Chat Completions"}})},
        *("server-token-other", Level.UNKNOWN, "does not support"),
    ),
    "500": (
        {"refuse": (500, {"error": {"message": "EngineCore encountered an issue"}})},
        *("server-token-refused", Level.ERROR, "500: EngineCore encountered"),
    ),
    "content null": (
        {"raw": b'{"choices": [], "usage": {"completion_tokens": 16}}'},
        *("server-content", Level.WARNING, "16 tokens came and no text"),
    ),
    "hits": (
        {"metrics": metrics("0.10", queries=400, hits=300)},
        "server-load",
        Level.OK,
        "75 %",
    ),
    "preempted": (
        {"metrics": metrics("0.33", preemptions=3)},
        "server-preemptions",
        "note",
        "3",
    ),
    "failed": (
        {"metrics": metrics("0.33", failed=2)},
        "server-errors",
        Level.WARNING,
        "2 requ",
    ),
    "no metrics": ({"metrics": ""}, "server-metrics", Level.UNKNOWN, "404"),
    "other metrics": (
        {"metrics": "up 1\n"},
        "server-metrics",
        Level.UNKNOWN,
        "no figure of the cache",
    ),
    "odd metrics": (
        {"metrics": "vllm:kv_cache_usage_perc NaN\n"},
        "server-metrics",
        Level.UNKNOWN,
        "or an odd one",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong(name):
    faults, about, level, words = WRONG[name]
    with ModelServer(**faults) as server:
        said = looked(server)
    found = judged(said)[about]
    assert found.level == level
    assert words in f"{found.what} {found.why} {found.hint}"


LIVES_OF = {  # what the server does → state, and words
    "embeds": ({"embeds": True}, ANSWERS, "a token came"),
    "other key": ({"key": SECRET}, REFUSES, "/v1/models says 401"),
    "listing fails": ({"listing": 500, "models": ()}, DOUBT, "/v1/models says 500"),
    "no model": ({"models": ()}, DOUBT, "names no model"),
    "busy": (
        {"refuse": (429, {"error": {"message": "later"}})},
        REFUSES,
        "HTTP 429 later",
    ),
    "no such question": (
        {"refuse": (404, {"detail": "none"})},
        REFUSES,
        "HTTP 404 none",
    ),
    "engine fails": (
        {"refuse": (500, {"error": {"message": "dead"}})},
        DOUBT,
        "HTTP 500 dead",
    ),
    "choices of an error": (
        {"refuse": (500, {"choices": [{"text": "a"}]})},
        DOUBT,
        "HTTP 500",
    ),
    "empty": ({"raw": b'{"choices": []}'}, DOUBT, "no answer of the OpenAI API"),
    "late": ({"silent": True}, DOUBT, "no token in the 2 s since one was asked for"),
    "late, no counters": (
        {"silent": True, "metrics": "up 1\n"},
        LIVES,
        "has no counters",
    ),
    "late, no metrics": ({"silent": True, "metrics": ""}, LIVES, "has no counters"),
}


@pytest.mark.parametrize("name", LIVES_OF)
def test_a_server_without_a_token_never_answers(name):
    faults, state, words = LIVES_OF[name]
    with ModelServer(**faults) as server:
        life = looked(server).life
    assert life.state == state
    assert words in life.text


def test_an_embedding_is_told_as_no_text():
    with ModelServer(embeds=True) as server:
        found = judged(looked(server))["server-token-other"]
    assert "an embedding or a score came" in found.what


def test_the_key_is_sent_and_never_comes_back(tmp_path, monkeypatch):
    file = tmp_path / "secrets.env"
    file.write_text(f'HF_TOKEN=other\nVLLM_API_KEY="{SECRET}"\n')
    with ModelServer(key=SECRET) as server:
        said = looked(server, key_file=str(file))
        server.faults.refuse = (500, {"error": {"message": f"bad {SECRET}"}})
        refused = looked(server, key_file=str(file))
        monkeypatch.setenv("VLLM_API_KEY", SECRET)
        here = looked(server)
    assert said.token.fields == ("content",)
    assert refused.token.said == "bad (masked)"
    assert (said.key, here.key) == (str(file), "the environment")
    assert SECRET not in f"{said} {refused} {here}"


@pytest.mark.parametrize("key", ["a\r\nX-Other: b", "ключ"])
def test_a_key_that_no_header_can_hold(key, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", key)
    with ModelServer() as server:
        assert looked(server).token.fields == ("content",)
    assert not [
        each
        for each in server.headers_seen
        if "Authorization" in each or "X-Other" in each
    ]


def counted(generated, **drafting):
    """A text of /metrics with counters: of generated tokens, and of drafts."""
    rows = {"generation_tokens": generated}
    rows |= {f"spec_decode_num_{name}": value for name, value in drafting.items()}
    lines = [f"vllm:{name}_total{{{LABELS}}} {value}\n" for name, value in rows.items()]
    return metrics("0.33", running=2, usage=0.5) + "".join(lines)


SPEEDS = {  # two texts of /metrics → tokens that came, accepted drafts, tokens of a draft
    "plain": (counted(100), counted(142), 42, None, 0),
    "drafts": (
        counted(0),
        counted(9, drafts=10, draft_tokens=40, accepted_tokens=4),
        *(9, 0.1, 4),
    ),
    "restarted": (counted(100), counted(3), 0, None, 0),
    "more than drafted": (
        counted(0),
        counted(0, drafts=1, draft_tokens=4, accepted_tokens=9),
        *(0, 1, 4),
    ),
    "huge": (counted(0), counted(1e300, draft_tokens=1e-300), 1e12, 0, 1e-300),
}


@pytest.mark.parametrize("name", SPEEDS)
def test_speed(name, tmp_path, monkeypatch):
    """Two requests, half of a cache of 10 GB in use, 5 GB of weights for a token, at 100 GB/s."""
    before, after, tokens, accepted, drafted = SPEEDS[name]
    monkeypatch.setenv("HOME", str(tmp_path))
    with ModelServer(metrics=[before, after]) as server:
        group = {"url": server.url, "id": "1", "unit": "x.service", "name": "vllm"}
        group |= {"workers": {}, "watts": 0, "frozen": 120, "speed": [5e9, 1e10, 1e11]}
        file = {".config/patchkit/vllm/group.json": json.dumps(group)}
        write_files(tmp_path, file)
        speed = looked(server, cluster="vllm", speed=True).speed
    assert (speed.requests, speed.accepted) == (2, accepted)
    assert speed.drafted == drafted
    assert tokens / 3 <= speed.now <= tokens
    assert speed.most == 20 * (1 + drafted * (accepted or 0))


@pytest.mark.parametrize("value", ["inf", "1e400", "-1", "NaN", "x"])
def test_a_speed_that_no_server_has_is_unknown(value):
    with ModelServer(metrics=[counted(0), counted(value)]) as server:
        assert looked(server, speed=True).speed is None


HOSTILE = {
    "deep": b"[" * 100_000,
    "odd types": b'{"choices": {"0": 1}, "usage": [], "error": 5}',
    "odd texts": b'{"choices": [{"message": {"content": 5, "reasoning": {"a": 1}}}]}',
    "negative": b'{"usage": {"completion_tokens": -5, "prompt_tokens": true}}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_answer_that_is_hostile(name):
    with ModelServer(raw=HOSTILE[name]) as server:
        said = looked(server)
    for each in judged(said).values():
        each.what.encode()
    assert (said.token.tokens, said.token.fields) == (None, ())


def test_an_answer_without_an_end_ends():
    with ModelServer(metrics="", raw=b"x" * 65536, endless=True) as server:
        assert looked(server).token.trouble
