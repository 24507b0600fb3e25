"""Command lines of `vllm serve` held against vLLM's own parser; run with a Python that has vLLM.

Reads a list of lists of words from standard input, prints a list of texts: empty for a line that
vLLM takes, else what it says; exits with 3 if this Python cannot import vLLM. No GPU:
VLLM_TARGET_DEVICE=cpu is set, no kernel is loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import sys

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

try:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli import serve
except (ImportError, AttributeError, RuntimeError) as error:  # other versions of what it requires
    sys.stderr.write(f"vLLM cannot be imported: {type(error).__name__}: {error}\n")
    sys.exit(3)


def verdict(words: list[str]) -> str:
    """What vLLM says against ``vllm serve …``."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            arguments = PARSER.parse_args(words[1:])
            arguments.model = arguments.model_tag
            COMMAND.validate(arguments)
            _configs(arguments)
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1]
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        return f"{type(error).__name__}: {error}"
    return ""


def _configs(arguments: argparse.Namespace) -> None:
    """Values that the parser passes on as text, and that configs refuse later."""
    AsyncEngineArgs.from_cli_args(arguments).create_load_config()
    if backend := getattr(arguments, "attention_backend", None):
        importlib.import_module("vllm.config.attention").AttentionConfig(backend=backend)


COMMAND = serve.ServeSubcommand()
PARSER = serve.FlexibleArgumentParser(prog="vllm")
COMMAND.subparser_init(PARSER.add_subparsers(dest="subparser"))

if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = [verdict(words) for words in json.load(sys.stdin)]
    sys.stdout.write(json.dumps(found))
