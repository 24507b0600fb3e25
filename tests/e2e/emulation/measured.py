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
    ways = ("one", "other")
    with lab.sparks(1, "bench") as (spark,):
        folder, files = "/tmp/figures", [f"/tmp/{name}.env" for name in ways]
        for number, file in enumerate(files):
            text = "".join(f"{name}={value}\n" for name, value in QUIET.items())
            spark.file(file).write_text(f"{text}OMP_NUM_THREADS={number + 1}\n")

        def said(*words: str) -> Any:
            command = ("sh", "-c", '"$@" 2> /tmp/aside', "sh", "patchkit", "bench", *words)
            return json.loads(spark.run(*command, log="bench", seconds=SECONDS))

        load = (*LOAD, "--venv", sys.prefix, "-o", folder, "--json")
        asked = (str(lab.model), "--compare", *files, *load, "--", *ARGS)
        first, again = said(*asked), said(*asked)
        differs = said("diff", folder, folder, "--json")
    names = [each["variant"] for each in first["figures"] if each["figure"] == "output"]
    if names != [*ways]:
        raise UnexpectedError(f"figures of {names}")
    if again != first or differs["setup"]:
        raise UnexpectedError("the same command measured again, or its setup differs from itself")
    return Outcome(f"{len(first['figures'])} figures of {len(names)} ways; again, nothing to do")
