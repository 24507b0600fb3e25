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
_OPPOSITES = ("--enable-", "--disable-")
_PARSER = "utils/argparse_utils.py"
_PAIRS = "EnableDisableAction"
_ENGINE = "engine/arg_utils.py"
_SERVE = "entrypoints/cli/serve.py"


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
    readers = {}
    for node in parse_file(place).body:
        match node:
            # The dict has an annotation or none, by release.
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict() as table)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict() as table)
            ) if name == _DICT:
                for key, reader in zip(table.keys, table.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        readers[key.value] = reader

    if not readers:
        raise _unread(place, f"has no dict {_DICT}")
    return readers


def read_flags(home: Path) -> frozenset[str]:
    """Return the flags in the files below the folder of a vLLM. Raises SourceError."""
    engine = home / _ENGINE
    servers = sorted((home / "entrypoints").glob("*/cli_args.py"))
    if not servers:
        parse_file(engine)
        raise _unread(home / "entrypoints", "has no cli_args.py, one folder down")

    # The verb's own file may declare none; the others always do, or their form is a new one.
    flags = set(_declared_flags(parse_file(home / _SERVE)))
    for place in (engine, *servers):
        declared = set(_declared_flags(parse_file(place)))

        if not declared:
            raise _unread(
                place, "declares no flags in a way that any known release does"
            )

        flags |= declared

    # This class makes --disable-X of every --enable-X, and the reverse.
    parser = home / _PARSER
    body = parse_file(parser).body if parser.is_file() else []
    if any(getattr(row, "name", "") == _PAIRS for row in body):
        flags |= set(map(_opposite_flag, flags))

    return frozenset(flags)


def _opposite_flag(flag: str) -> str:
    """Return --disable-X for --enable-X, the reverse, or the flag if it has no opposite."""
    for prefix, opposite in (_OPPOSITES, _OPPOSITES[::-1]):
        if flag.startswith(prefix):
            return opposite + flag.removeprefix(prefix)

    return flag


def _declared_flags(tree: ast.Module) -> Iterator[str]:
    """Yield the flags that functions and classes of a file declare."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) if name in _FUNCTIONS:
                # Also those of a list that is looped over.
                for part in ast.walk(node):
                    match part:
                        case ast.Constant(value=str(text)) if _FLAG.fullmatch(text):
                            yield text
            case ast.ClassDef(name=name) if name in _CLASSES:
                for part in node.body:
                    match part:
                        case ast.AnnAssign(target=ast.Name(id=field)):
                            yield f"--{field.replace('_', '-')}"
