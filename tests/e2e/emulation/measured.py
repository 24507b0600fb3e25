"""`patchkit bench` with real vLLM: two ways in turns, gone on with, and compared."""

from __future__ import annotations

import json
import sys
from typing import Any

from e2e.emulation.lab import QUIET, Lab
from e2e.emulation.scenarios import Outcome, UnexpectedError

LOAD = ("--input", "32", "--output", "8", "--concurrency", "1", "--rounds", "1")
ARGS = ("--dtype", "float32", "--max-model-len", "512", "--enforce-eager")
SECONDS = 400


def bench(lab: Lab) -> Outcome:
    """`patchkit bench`: two ways to serve a model in turns, again with nothing left to do."""
    ways = {"one": ARGS, "other": (*ARGS, "--max-num-seqs", "4")}
    text = "".join(
        f"[[variant]]\nname = '{name}'\nplain = true\nvenv = '{sys.prefix}'\n"
        f"args = {json.dumps(args)}\nset = {_inline(QUIET)}\n"
        for name, args in ways.items()
    )
    with lab.sparks(1, "bench") as (spark,):
        file, folder = spark.file("/tmp/ways.toml"), "/tmp/figures"
        file.write_text(text)

        def said(*words: str) -> Any:
            command = ("sh", "-c", '"$@" 2> /tmp/aside', "sh", "patchkit", "bench", *words)
            return json.loads(spark.run(*command, "--json", log="bench", seconds=SECONDS))

        asked = (str(lab.model), "--variants", "/tmp/ways.toml", *LOAD, "-o", folder)
        first, again = said(*asked), said(*asked)
        differs = said("diff", folder, folder)
    names = [each["variant"] for each in first["figures"] if each["figure"] == "output"]
    if names != list(ways):
        raise UnexpectedError(f"figures of {names}")
    if again != first or differs["setup"]:
        raise UnexpectedError("the same command measured again, or its setup differs from itself")
    return Outcome(f"{len(first['figures'])} figures of {len(names)} ways; again, nothing to do")


def _inline(table: dict[str, str]) -> str:
    """Return an inline table of TOML."""
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items()) + " }"
