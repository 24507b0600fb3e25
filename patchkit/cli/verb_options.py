"""Read the arguments and options of verbs from options.toml."""

from __future__ import annotations

from collections.abc import Callable

import click

from patchkit.cli.out import FILE_OR_DASH, FOLDER, PATH, PRESENT_PATH
from patchkit.cli.render import Option, Verb, option, with_options
from patchkit.frozen import Fields
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.node.topology import check_ipv4
from patchkit.runtime.rules.rule import CHOICES
from patchkit.target import targets

_TABLES = read_toml(dict[str, Fields], RECIPES / "cli/options.toml")
_TYPES: Fields = {
    "number": int,
    "path": PATH,
    "present path": PRESENT_PATH,
    "folder": FOLDER,
    "path or -": FILE_OR_DASH,
    "address": check_ipv4,
    "device": click.Choice(list(targets())),
    "role": click.Choice(CHOICES["role"]),
    "quantization": click.Choice(CHOICES["quantization"]),
}
# Keys of a row → the function that makes its type.
_MAKERS: Fields = {
    "choices": click.Choice,
    "range": lambda limits: click.IntRange(**limits),
    "type": _TYPES.__getitem__,
}


def options_of(verb: str) -> Callable[[Verb], Verb]:
    """Return a decorator that adds a verb's arguments and options, in their order there."""
    shared = _TABLES["shared"]
    rows = [shared.get(str(row), row) for row in _TABLES["verb"][verb]]
    return with_options(*map(_read_option, rows))


def _read_option(row: Fields) -> Option:
    settings = {**row}
    for key in _MAKERS.keys() & row.keys():
        settings["type"] = _MAKERS[key](settings.pop(key))

    if "argument" in row:
        return click.argument(settings.pop("argument"), **settings)
    return option(*settings.pop("words"), **settings)
