"""Read the names of variables and flags in the files of a vLLM, without importing it.

In all releases, ``envs.py`` has the dict ``environment_variables``, which maps a name to the code
that reads it. This dict decides which variables exist: since 0.17, vLLM itself warns of each VLLM_*
that is set and not in it ("Unknown vLLM environment variable detected").

Flags of the engine are declared one by one in ``engine/arg_utils.py``. Flags of the server are the
fields of a class in ``cli_args.py``, which moved twice, and a few are declared where the parser is
made.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from patchkit.errors import SourceError, StorageError, UsageError
from patchkit.reading import LARGEST_IN_TREE, parse_python, read_bytes

_DICT = "environment_variables"
_FLAG = r"--?[A-Za-z][\w-]*"
# The functions that declare flags as literals, and the classes whose fields are flags.
_FUNCTIONS = ("add_cli_args", "make_arg_parser", "subparser_init")
_CLASSES = ("BaseFrontendArgs", "FrontendArgs")
# In releases whose parser has the class EnableDisableAction, each flag with one of these prefixes
# also exists with the other one.
_OPPOSITES = ("--enable-", "--disable-")
_PARSER = "utils/argparse_utils.py"
_PAIRS = "EnableDisableAction"
_ENGINE = "engine/arg_utils.py"
_SERVE = "entrypoints/cli/serve.py"


def parse_file(place: Path) -> ast.Module:
    """Return a Python file of vLLM as a syntax tree. Raises SourceError if it cannot be read."""
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
    """Return variable → the code that reads it, from an ``envs.py``.

    Raises SourceError if the file cannot be read or has no such dict.
    """
    readers = {}
    for node in parse_file(place).body:
        match node:
            # In some releases the dict has an annotation, in others none.
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
    """Return the flags that the files in the folder of a vLLM declare.

    Raises SourceError if a file is missing or cannot be read, or if a file other than
    ``entrypoints/cli/serve.py`` declares no flags.
    """
    engine = home / _ENGINE
    servers = sorted((home / "entrypoints").glob("*/cli_args.py"))
    if not servers:
        parse_file(engine)
        raise _unread(home / "entrypoints", "has no cli_args.py, one folder down")

    # serve.py may declare none. If another file declares none, vLLM declares its flags in a new way
    # that this module does not know.
    flags = set(_declared_flags(parse_file(home / _SERVE)))
    for place in (engine, *servers):
        declared = set(_declared_flags(parse_file(place)))

        if not declared:
            raise _unread(
                place, "declares no flags in a way that any known release does"
            )

        flags |= declared

    # The class adds --disable-X for every --enable-X, and the reverse.
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
                # Literals anywhere in the function: some flags stand in a list for a loop.
                for part in ast.walk(node):
                    match part:
                        case ast.Constant(value=str(text)) if re.fullmatch(_FLAG, text):
                            yield text
            case ast.ClassDef(name=name) if name in _CLASSES:
                for part in node.body:
                    match part:
                        case ast.AnnAssign(target=ast.Name(id=field)):
                            yield f"--{field.replace('_', '-')}"
