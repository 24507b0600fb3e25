"""`patchkit chat` as its users run it: in pipes, in a terminal, and when something goes wrong."""

import contextlib
import json
import os
import select
import subprocess
import sys
import time

import pytest

from support import write_files

pytest.importorskip("openai", reason="openai is not installed: the extra chat")

from support.model_server import ModelServer, recorded
from support.terminal import terminal

THOUGHT, ANSWER = "Six times seven: six rows of sevens, naïvely added", "It is **42**, or 四十二."
CALL = '{"city": "Paris", "days": 2}}'  # 0.11.0 sends a brace too many
THINKS, DIES = recorded("0.32.0-thinks"), recorded("0.11.0-dies")
SECRET = "kkk-very-secret-kkk"
PAUSE = 0.3  # seconds before a key that answers what is on the screen
PATCHKIT = (sys.executable, "-m", "patchkit")


@pytest.fixture
def alone(environment, tmp_path):
    """What chat is run with: no key and no settings of whoever runs the tests."""
    own = {name: value for name, value in environment.items() if name != "VLLM_API_KEY"}
    return own | {"HOME": str(tmp_path)}


@pytest.fixture
def chat(alone):
    """Run it in pipes: ``chat(server, "a question", rc=9)``."""

    def run(server, *words, rc=0, env=None, **how):
        url = server if isinstance(server, str) else server.url
        command = [*PATCHKIT, "chat", *(("--url", url) if url else ()), *words]
        how |= {"capture_output": True, "text": True, "timeout": 60}
        done = subprocess.run(command, env={**alone, **(env or {})}, **how)
        assert done.returncode == rc, done
        assert "Traceback" not in done.stderr
        return done

    return run


# In pipes


def test_the_answer_alone_is_on_standard_output(chat):
    with ModelServer(recorded=THINKS) as server:
        done = chat(server, "-", input="What is six times seven?\n")
    assert done.stdout == f"{ANSWER}\n"
    thought, blank, counts = done.stderr.splitlines()
    assert (thought, blank) == (f"reasoning: {THOUGHT}", "")
    assert counts.startswith("tokens: 7 read, 20 written (10 reasoning); first after ")
    (body,) = server.asked
    assert body == {
        "model": "small",
        "messages": [{"role": "user", "content": "What is six times seven?\n"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_what_is_asked_for_is_in_the_request(chat):
    words = ["--model", "m", "--system", "Be brief.", "--max-tokens", "9"]
    more = '{"top_p": 0.5, "temperature": 1}'
    with ModelServer() as server:
        chat(server.url + "/v1/", *words, "--no-think", "--body", more, "Hello")
    (body,) = server.asked
    del body["stream"], body["stream_options"]
    assert body == {
        "model": "m",
        "max_tokens": 9,
        "temperature": 1,
        "top_p": 0.5,
        "chat_template_kwargs": {"enable_thinking": False, "thinking": False},
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
        ],
    }


@pytest.mark.parametrize("name", ["0.32.0-thinks", "0.11.0-calls", "0.11.0-dies"])
def test_json_is_a_line_for_each_event(chat, name):
    kind = name.rpartition("-")[2]
    with ModelServer(recorded=recorded(name)) as server:
        done = chat(server, "--json", "Hello", rc=9 if kind == "dies" else 0)
    assert done.stderr == ""
    *others, end = [json.loads(line) for line in done.stdout.splitlines()]
    if kind == "thinks":
        for each, text in (("reasoning", THOUGHT), ("content", f"\n\n{ANSWER}")):
            assert "".join(e["text"] for e in others if e["kind"] == each) == text
        assert (end["kind"], end["model"], end["completion_tokens"]) == ("end", "small", 20)
    elif kind == "calls":
        (call,) = others
        found = (call["kind"], call["name"], call["arguments"])
        assert found == ("tool_call", "weather", CALL)
    else:
        assert end["error"]["exit_code"] == 9
        assert "EngineCore encountered an issue" in end["error"]["what"]


NO_ANSWER = "what came is no answer of the OpenAI API"
ODD = b'data: {"choices": [{"delta": {"content": 5}}]}\n\ndata: [1]\n\n'
WRONG = {  # what the server does → what is on standard output, and words beside it
    "null": (
        {"recorded": recorded("0.32.0-short")},
        "",
        ["all 4 tokens went", "--max-tokens 4096"],
    ),
    "dies": (
        {"recorded": THINKS, "cut_after": 14},
        "It is **42**\n",
        ["broke off: the connection"],
    ),
    "engine dies": ({"recorded": DIES}, "", ["EngineCore enc", "patchkit explain 'EngineCore"]),
    "key": ({"key": SECRET}, "", ["and none was sent (401)", "--key-env NAME"]),
    "odd types": ({"raw": ODD}, "", [NO_ANSWER]),
    "no JSON": ({"raw": b"data: {{{\n\n"}, "", [NO_ANSWER]),
    "no end": ({"raw": b"data: x\n" * 8192, "endless": True}, "", [NO_ANSWER]),
    "no models": ({"models": ()}, "", ["no server of the OpenAI API", "says 200: no model"]),
    "silent": ({"silent": True}, "", ["no answer in 1 s"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_goes_wrong_is_explained(chat, name):
    faults, stdout, words = WRONG[name]
    with ModelServer(**faults) as server:
        done = chat(server, "--timeout", "1", "Hello", rc=9)
    assert done.stdout == stdout
    said = " ".join(done.stderr.split())
    assert not [each for each in words if each not in said], said


def test_no_server_and_no_such_model(chat, alone):
    gone = (404, {"error": {"message": "The model `x` does not exist."}})
    with ModelServer(refuse=gone) as server:
        done = chat(server, "--model", "x", "Hello", rc=9)
    assert "the server has no model x; it has small" in done.stderr
    done = chat(server, "Hello", rc=9)  # it is gone by now
    assert f"no server answers at {server.url}: Connection refused" in done.stderr
    assert "next: " in done.stderr


def test_the_key_comes_from_a_variable_and_no_message_has_it(chat):
    refusal = (500, {"error": {"message": f"bad {SECRET}"}})
    with ModelServer(key=SECRET, refuse=refusal) as server:
        done = chat(server, "--key-env", "MINE", "Hello", env={"MINE": SECRET}, rc=9)
        wrong = chat(server, "--key-env", "MINE", "Hello", env={"MINE": "another-key"}, rc=9)
    assert server.headers_seen[0]["Authorization"] == f"Bearer {SECRET}"
    assert SECRET not in done.stderr + wrong.stdout + wrong.stderr
    assert "bad (masked)" in done.stderr
    assert "the one that was sent is not it (401)" in wrong.stderr


HOSTILE = "a\x1b[2J\x1b]0;t\x07b\x9bc\u202ed\x00\r\ne\u00a0f\u200d"


def test_what_a_terminal_would_obey_is_left_out(chat):
    choice = {"delta": {"content": HOSTILE, "reasoning": HOSTILE}, "finish_reason": "stop"}
    with ModelServer(raw=b"data: %s\n\n" % json.dumps({"choices": [choice]}).encode()) as server:
        done = chat(server, "Hello")
        lines = chat(server, "--json", "Hello").stdout
    kept = "a[2J]0;tbcd\ne\u00a0f\u200d"
    assert done.stdout == f"{kept}\n"
    assert f"reasoning: {kept}\n" in done.stderr
    assert [json.loads(each)["text"] for each in lines.splitlines()[:2]] == [HOSTILE, HOSTILE]
    assert not set("\x1b\x07\x9b\u202e\x00") & set(lines)


@pytest.mark.parametrize(
    ("url", "words", "said"),
    [
        ("http://h", [], "there is no question"),
        ("http://h", ["-"], "the question is empty"),
        ("http://h", ["--body", "[]", "Hello"], "--body: is no JSON object"),
        ("http://h", ["--key-env", "NOT_SET", "Hello"], "NOT_SET holds no key"),
        ("http://[x", ["Hello"], "is not the address of a server"),
        ("ftp://h", ["Hello"], "is not the address of a server"),
        ("http://u:PASS@h", ["Hello"], "is not the address of a server"),
    ],
)
def test_what_makes_no_sense(chat, url, words, said):
    done = chat(url, *words, input="", rc=2)
    assert said in done.stderr
    assert "PASS" not in done.stderr


def test_the_server_of_this_machine_is_found(chat, tmp_path):
    with ModelServer() as server:
        files = {"vllm/group.json": json.dumps({"url": server.url})}
        files["secrets.env"] = f"VLLM_API_KEY={SECRET}\n"
        write_files(tmp_path / ".config/patchkit", files)
        assert chat("", "Hello").stdout == "ready\n"
    assert server.headers_seen[0]["Authorization"] == f"Bearer {SECRET}"


# In a terminal


def test_ctrl_c_ends_the_answer_and_not_the_programme(alone):
    faults = {"recorded": THINKS, "cut_after": 14, "silent": True}
    ours, theirs = terminal(80)
    said, fresh = bytearray(), bytearray()

    def after(text, typed=b"", again=b""):
        """Wait for a text and type the next one; in a long silence type ``again``."""
        end = time.monotonic() + 30
        while text not in fresh:
            assert time.monotonic() < end, said
            if select.select([ours], [], [], 5)[0]:
                part = os.read(ours, 1 << 16)
                said.extend(part)
                fresh.extend(part)
            else:
                os.write(ours, again)
        del fresh[: fresh.index(text) + len(text)]
        os.write(ours, typed)

    def interrupt():
        # A signal that comes while select is on its way is not noticed before the next key: that
        # is how readline waits, and how every program in Python does.
        time.sleep(PAUSE)
        os.write(ours, b"\x03")
        after(b"> ", again=b"\x03")

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ModelServer(**faults))
        words = [*PATCHKIT, "chat", "--system", "Be brief.", "--url", server.url]
        environment = {**alone, "TERM": "xterm", "INPUTRC": "/dev/null"}
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        process = subprocess.Popen(["setsid", "--ctty", *words], env=environment, **streams)
        stack.callback(process.kill)
        after(b"> ", b"abc")
        after(b"abc")
        interrupt()  # what was typed is gone
        os.write(ours, b"Six?\n")
        after(b"**42**")
        interrupt()
        server.faults.cut_after = None
        server.faults.silent = False
        os.write(ours, b"Go on.\n")
        after(b"tokens: ")
        after(b"> ", b"\x04")
        assert process.wait(20) == 0
    shown = said.decode()
    assert "\x1b[2mreasoning: Six\x1b[0m\x1b[2m times\x1b[0m" in shown
    assert "\r\n\r\nIt is **42**, or 四十二.\r\n\x1b[2mtokens: 7 read" in shown
    # What came before Ctrl-C belongs to the talk.
    talk = [each["content"] for each in server.asked[1]["messages"]]
    assert talk == ["Be brief.", "Six?", "\n\nIt is **42**", "Go on."]
