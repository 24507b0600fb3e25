"""Read the names of variables and flags in the files of a vLLM, without importing it.

All releases have the dict ``environment_variables`` in ``envs.py``: a name, and what reads it.
Since 0.17 vLLM itself warns of each VLLM_* that is set and not in this dict ("Unknown vLLM
environment variable detected"), so the dict decides what is known.

Engine arguments are declared one by one in ``engine/arg_utils.py``, those of the server as fields
of a class in ``cli_args.py``, which moved twice; a few more where the parser is put together.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from patchkit.errors import SourceError, StorageError, UsageError
from patchkit.reading import LARGEST_IN_TREE, parse_python, read_bytes

_DICT = "environment_variables"
_FLAG = re.compile(r"--?[A-Za-z][\w-]*")
# The functions that declare flags, by their literal names, and the classes whose fields are flags.
_FUNCTIONS = ("add_cli_args", "make_arg_parser", "subparser_init")
_CLASSES = ("BaseFrontendArgs", "FrontendArgs")
# An action of vLLM's own pairs these, in the releases whose parser has it.
_PAIRED = re.compile(r"--(enable|disable)-(.*)")
_PARSER, _PAIRS = "utils/argparse_utils.py", "EnableDisableAction"
_ENGINE, _SERVE = "engine/arg_utils.py", "entrypoints/cli/serve.py"


def parse_file(place: Path) -> ast.Module:
    """Return a file of vLLM as a syntax tree. Raises SourceError."""
    try:
        return parse_python(read_bytes(place, limit=LARGEST_IN_TREE))
    except (UsageError, StorageError) as error:
        raise _unread(place, error.what.removeprefix(f"{place}: ")) from None
    except SyntaxError as error:
        raise _unread(place, f"is not Python: {error}") from None


def _unread(place: Path, what: str) -> SourceError:
    return SourceError(
        f"{place}: {what}",
        why="vLLM is damaged, or newer than any release that patchkit knows",
        hint="install vLLM again, or name a release with --vllm, for example --vllm 0.33.0",
    )


def variable_readers(place: Path) -> dict[str, ast.expr]:
    """Return name → the code that reads it, of an ``envs.py``. Raises SourceError."""
    found = {}
    for node in parse_file(place).body:
        # With or without an annotation, by release.
        target = getattr(node, "target", None) or getattr(node, "targets", [None])[0]
        table = getattr(node, "value", None)
        if (
            isinstance(target, ast.Name)
            and target.id == _DICT
            and isinstance(table, ast.Dict)
        ):
            for key, reader in zip(table.keys, table.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    found[key.value] = reader
    if not found:
        raise _unread(place, f"has no dict {_DICT}")
    return found


def read_flags(home: Path) -> frozenset[str]:
    """Return the flags in the files below the folder of a vLLM. Raises SourceError."""
    servers = sorted((home / "entrypoints").glob("*/cli_args.py"))
    if not servers:
        parse_file(home / _ENGINE)
        raise _unread(home / "entrypoints", "has no cli_args.py, one folder down")
    # The verb's own file may declare none; the others always do, or their form is a new one.
    declared = {*_declared_flags(parse_file(home / _SERVE))}
    for place in (home / _ENGINE, *servers):
        found = {*_declared_flags(parse_file(place))}
        if not found:
            raise _unread(
                place, "declares no flags in a way that any known release does"
            )
        declared |= found
    parser = home / _PARSER
    body = parse_file(parser).body if parser.is_file() else []
    if any(isinstance(node, ast.ClassDef) and node.name == _PAIRS for node in body):
        for match in filter(None, [_PAIRED.fullmatch(flag) for flag in declared]):
            declared.add(
                f"--{'disable' if match[1] == 'enable' else 'enable'}-{match[2]}"
            )
    return frozenset(declared)


def _declared_flags(tree: ast.Module) -> Iterator[str]:
    """Yield texts that are nothing but a flag, also those of a list that is looped over; fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in _FUNCTIONS:
            for inner in ast.walk(node):
                text = inner.value if isinstance(inner, ast.Constant) else None
                if isinstance(text, str) and _FLAG.fullmatch(text):
                    yield text
        elif isinstance(node, ast.ClassDef) and node.name in _CLASSES:
            for row in node.body:
                if isinstance(row, ast.AnnAssign) and isinstance(row.target, ast.Name):
                    yield f"--{row.target.id.replace('_', '-')}"
