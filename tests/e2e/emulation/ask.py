"""Runs in a node: waits for a server's health, then has it complete two long texts.

    python ask.py MODEL_FOLDER URL SECONDS

Prints a JSON list of what came back: each text with its tokens, at temperature 0.
"""

from __future__ import annotations

import json
import random
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

PROMPT_WORDS, ANSWER_WORDS = 300, 32


def complete(
    url: str, model: Path, prompt: list[int], seconds: float
) -> tuple[str, list[int]]:
    question = {
        "model": str(model),
        "prompt": prompt,
        "max_tokens": ANSWER_WORDS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    headers = {"Content-Type": "application/json"}
    body = json.dumps(question).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            choice = json.load(response)["choices"][0]
    except urllib.error.HTTPError as error:
        raise SystemExit(f"HTTP {error.code}: {error.read().decode()}") from None
    return choice["text"], choice["token_ids"]


def main(model: Path, url: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
    # Texts as tokens, so that nothing depends on a release's tokenizer.
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    words = [number for word, number in vocabulary.items() if word.isalpha()]
    dice = random.Random(1)
    prompts = [dice.choices(words, k=PROMPT_WORDS) for _ in range(2)]
    answers = [complete(url, model, prompt, seconds) for prompt in prompts]
    sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
