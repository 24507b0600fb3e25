"""Runs in a node: asks a server in many ways, one after the other, for so many minutes.

    python load.py MODEL_FOLDER URL MINUTES

Prints a JSON object: how often each way was gone, and what went wrong.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import sys
import time
import urllib.parse
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

MODEL, PLACE = sys.argv[1], urllib.parse.urlsplit(sys.argv[2]).netloc
DICE = random.Random(1)


def ask(prompt: int, answer: int, *, slowly: float = 0, most: int = 1 << 30) -> None:
    """Read an answer as it comes, with so many seconds between two pieces, and so many of them."""
    # As tokens, so that nothing depends on a tokenizer.
    tokens = [DICE.randrange(2, 300) for _ in range(prompt)]
    question = {
        "model": MODEL,
        "prompt": tokens,
        "max_tokens": answer,
        "ignore_eos": True,
    }
    headers = {"Content-Type": "application/json"}
    with contextlib.closing(http.client.HTTPConnection(PLACE, timeout=300)) as link:
        link.request(
            "POST", "/v1/completions", json.dumps(question | {"stream": True}), headers
        )
        response = link.getresponse()
        if response.status != 200:
            raise OSError(f"HTTP {response.status}: {response.read(200)!r}")
        for _ in range(most):
            if not response.readline():
                break
            time.sleep(slowly)


def ask_at_once() -> None:
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(ask, 50, 16) for _ in range(8)]:
            done.result()


def connect() -> None:
    """Be connected, and say nothing."""
    with contextlib.closing(http.client.HTTPConnection(PLACE)) as link:
        link.connect()
        time.sleep(100)


WAYS = {
    "short": lambda: ask(50, 32),
    "long prompt": lambda: ask(12_000, 4),
    "long answer": lambda: ask(100, 400),
    "slow reader": lambda: ask(50, 100, slowly=1),
    "given up while it answers": lambda: ask(50, 400, most=4),
    "given up in its prompt": lambda: ask(12_000, 4, most=0),
    "burst": ask_at_once,
    "connected": connect,
    "nobody": lambda: time.sleep(150),
}


def main(minutes: float) -> None:
    counts, deadline = Counter[str](), time.monotonic() + 60 * minutes
    while time.monotonic() < deadline:
        name = DICE.choice([*WAYS])
        try:
            WAYS[name]()
        except (OSError, http.client.HTTPException) as error:
            name = f"{name} failed: {error}"
        counts[name] += 1
        time.sleep(DICE.uniform(1, 15))
    sys.stdout.write(json.dumps(counts) + "\n")


if __name__ == "__main__":
    main(float(sys.argv[3]))
