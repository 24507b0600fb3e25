"""`patchkit chat` and a real server, with vLLM's own parsers and a model whose words are known."""

from __future__ import annotations

import json
import re

from e2e.emulation.lab import Lab
from e2e.emulation.scenarios import Outcome, UnexpectedError
from e2e.emulation.talking_model import (
    ANSWER,
    CALLED,
    CONTEXT,
    THOUGHT,
    WEATHER,
    make_talking_model,
)

TALKS = (
    *("--reasoning-parser", "deepseek_r1", "--max-model-len", str(CONTEXT)),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)


def chat(lab: Lab) -> Outcome:
    """`patchkit chat` beside vLLM's own parsers, with a model whose words are known."""
    talker = lab.work / "talker"
    make_talking_model(talker)
    with lab.sparks(1, "chat") as (spark,):
        url = lab.wait(spark, lab.serve(spark, *TALKS, model=talker))

        def said(*words: str, before: str = "") -> str:
            asked = f'{before} patchkit chat --url "$0" "$@" 2> /tmp/aside; echo "exit $?"'
            command = ("sh", "-c", f"{asked}; cat /tmp/aside", url, *words)
            return spark.run(*command, log="chat", seconds=120)

        question, thought, answer = "Six times seven?", "".join(THOUGHT), "".join(ANSWER).strip()
        for words, expected in (
            ((question,), f"{answer}\nexit 0\nreasoning: {thought}\n\ntokens: 5 read, 20 written"),
            (("--no-think", question), "It's 42!\nexit 0\ntokens: "),
            (("--max-tokens", "4", question), "exit 9\nreasoning: Six times seven\ntokens: "),
            (("--body", json.dumps({"tools": [WEATHER]}), "Rain?"), f"exit 0\ntool call: {CALLED}"),
        ):
            found = said(*words)
            _insist(found.startswith(expected), f"{words}: {found!r} is not {expected!r}")
        # As Ctrl-C, long before the context is full; vLLM has to notice, and to stop.
        found = said("count", before="timeout --preserve-status --signal=INT 6")
        _insist(found.startswith("exit 130\nreasoning: one two three one"), repr(found[-400:]))
        code = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())"
        figures = spark.run("python", "-c", code, f"{url}/metrics", log="metrics", seconds=20)
        _insist(re.search(r"num_requests_running\{.*\} 0\.0", figures) is not None, "it goes on")
    return Outcome("reasoning apart, a call, null content explained; Ctrl-C ends the request")


def _insist(condition: bool, otherwise: str) -> None:
    if not condition:
        raise UnexpectedError(otherwise)
