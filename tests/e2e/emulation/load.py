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
from pathlib import Path


class Load:
    """Questions to a server; texts are tokens, so that nothing depends on a tokenizer."""

    def __init__(self, model: Path, url: str) -> None:
        self.model, self.place = str(model), urllib.parse.urlsplit(url).netloc
        vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
        self.words = [number for word, number in vocabulary.items() if word.isalpha()]
        self.dice = random.Random(1)

    def ask(self, prompt: int, answer: int, *, slowly: float = 0, most: int = 1 << 30) -> None:
        """Read an answer as it comes, with so many seconds between two pieces, and so many."""
        link = http.client.HTTPConnection(self.place, timeout=300)
        question = {
            "model": self.model,
            "prompt": self.dice.choices(self.words, k=prompt),
            "max_tokens": answer,
            "ignore_eos": True,
            "stream": True,
        }
        with contextlib.closing(link):
            headers = {"Content-Type": "application/json"}
            link.request("POST", "/v1/completions", json.dumps(question), headers)
            response = link.getresponse()
            if response.status != 200:
                raise OSError(f"HTTP {response.status}: {response.read(200)!r}")
            for _ in range(most):
                if not response.readline():
                    break
                time.sleep(slowly)

    def burst(self) -> None:
        """Ask for eight short answers at once."""
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(self.ask, 50, 16) for _ in range(8)]:
                done.result()

    def connect(self) -> None:
        """Be connected, and say nothing."""
        link = http.client.HTTPConnection(self.place)
        with contextlib.closing(link):
            link.connect()
            time.sleep(100)


def main(model: Path, url: str, minutes: float) -> None:
    load, counts, deadline = Load(model, url), Counter[str](), time.monotonic() + 60 * minutes
    ways = {
        "short": lambda: load.ask(50, 32),
        "long prompt": lambda: load.ask(12_000, 4),
        "long answer": lambda: load.ask(100, 400),
        "slow reader": lambda: load.ask(50, 100, slowly=1),
        "given up while it answers": lambda: load.ask(50, 400, most=4),
        "given up in its prompt": lambda: load.ask(12_000, 4, most=0),
        "burst": load.burst,
        "connected": load.connect,
        "nobody": lambda: time.sleep(150),
    }
    while time.monotonic() < deadline:
        name = load.dice.choice([*ways])
        try:
            ways[name]()
        except (OSError, http.client.HTTPException) as error:
            name = f"{name} failed: {error}"
        counts[name] += 1
        time.sleep(load.dice.uniform(1, 15))
    sys.stdout.write(json.dumps(counts) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
