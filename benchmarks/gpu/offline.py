"""The same prompts through vLLM's ``LLM`` class, one at a time, for ``serve.py`` to compare with.

Run in a process of its own, with the arguments that the server was started with.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def main() -> None:
    """Write the tokens of every prompt in --asked, a list of [prompt, tokens], into --out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--arguments", type=json.loads, required=True, help="of LLM, in JSON"
    )
    parser.add_argument("--asked", type=json.loads, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    from vllm import LLM

    llm = LLM(options.model, **options.arguments)
    tokens = [generated(llm, prompt, count) for prompt, count in options.asked]
    options.out.write_text(json.dumps(tokens))


def generated(llm: Any, prompt: str, count: int) -> list[int]:
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return list(llm.generate([prompt], asked, use_tqdm=False)[0].outputs[0].token_ids)


if __name__ == "__main__":
    main()
