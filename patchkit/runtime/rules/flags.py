"""Return the flags of `vllm serve`, by release or as an installed vLLM declares them.

Engine arguments are declared one by one in ``engine/arg_utils.py``, those of the server as fields
of a class in ``cli_args.py``, which moved twice; a few more where the parser is put together.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from patchkit.paths import RECIPES
from patchkit.runtime.rules.lifetimes import Lifetime, Table, read_table
from patchkit.runtime.rules.vllm_names import parsed, unread

_FLAG = re.compile(r"--?[A-Za-z][\w-]*")
# The functions that declare flags, by their literal names, and the classes whose fields are flags.
_FUNCTIONS = ("add_cli_args", "make_arg_parser", "subparser_init")
_CLASSES = ("BaseFrontendArgs", "FrontendArgs")
_LEVEL = "--optimization-level"
# An action of vLLM's own pairs these, in the releases whose parser has it.
_PARSER, _PAIRS = "utils/argparse_utils.py", "EnableDisableAction"
_INVERSE = {"--enable-": "--disable-", "--disable-": "--enable-"}
_ENGINE, _SERVE = "engine/arg_utils.py", "entrypoints/cli/serve.py"


def flags(version: str, home: Path | None = None) -> frozenset[str]:
    """Return every flag of a release, ``""`` for any; of an installed vLLM, if its folder is given.

    Raises UsageError for what is no version; SourceError if ``home`` holds no vLLM.
    """
    return read_flags(home) if home else _of_release(version)


@cache
def _of_release(version: str) -> frozenset[str]:
    return frozenset(_flag_table().at(version))


def has_flag(flag: str, version: str, home: Path | None = None) -> bool:
    """Return whether `vllm serve` takes a flag, in any way of writing it.

    ``--max_model_len=8``, ``--no-enable-prefix-caching``, ``--compilation-config.mode``, ``-O3``.
    """
    known = flags(version, home)
    name = re.split(r"[=.]", flag, maxsplit=1)[0]
    if name.startswith("-O"):  # vLLM writes -O3 out before it looks at flags
        return _LEVEL in known or "-O" in known
    if name.startswith("--"):  # vLLM's parser takes _ for -
        name = name.replace("_", "-")
    # argparse makes --no-X of every switch --X (BooleanOptionalAction).
    return name in known or name.replace("--no-", "--", 1) in known


def flag_lifetime(flag: str) -> Lifetime | None:
    """Return the releases that take a flag, None for one that none takes."""
    return _flag_table().lifetime(flag)


def _flag_table() -> Table:
    return read_table(RECIPES / "env/vllm_flags.tsv")


@cache
def read_flags(home: Path) -> frozenset[str]:
    """Return the flags in the files below the folder of a vLLM. Raises SourceError."""
    servers = sorted((home / "entrypoints").glob("*/cli_args.py"))
    found = {
        place: frozenset(_declared_flags(parsed(place)))
        for place in (home / _ENGINE, home / _SERVE, *servers)
    }
    if not servers:
        raise unread(home / "entrypoints", "has no cli_args.py, one folder down")
    for place in (home / _ENGINE, *servers):
        # The verb's own file may declare none; these always do, or their form is a new one.
        if not found[place]:
            raise unread(place, "declares no flags in a way that any known release does")
    declared = frozenset().union(*found.values())
    parser = home / _PARSER
    body = parsed(parser).body if parser.is_file() else []
    paired = any(isinstance(node, ast.ClassDef) and node.name == _PAIRS for node in body)
    return declared | frozenset(_disable_flags(declared)) if paired else declared


def _disable_flags(declared: Iterable[str]) -> Iterator[str]:
    for flag in declared:
        for prefix, inverse in _INVERSE.items():
            if flag.startswith(prefix):
                yield flag.replace(prefix, inverse, 1)


def _declared_flags(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in _FUNCTIONS:
            yield from _literal_flags(node)
        elif isinstance(node, ast.ClassDef) and node.name in _CLASSES:
            yield from _field_flags(node)


def _literal_flags(function: ast.FunctionDef) -> Iterator[str]:
    """Return texts that are nothing but a flag, also those of a list that is looped over."""
    for node in ast.walk(function):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and _FLAG.fullmatch(text):
            yield text


def _field_flags(frontend: ast.ClassDef) -> Iterator[str]:
    for node in frontend.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield f"--{node.target.id.replace('_', '-')}"
