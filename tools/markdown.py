"""Write what pages that are made have in common."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MADE_OF_RECIPE = "<!-- Made by tools/regenerate.py from the recipe. Do not edit. -->\n"


def index(words: Iterable[str]) -> str:
    """Return entries of the site's index, which its search ranks above all else."""
    # A semicolon and an exclamation mark have a meaning there; `!` marks a main entry.
    plain = [word for word in dict.fromkeys(words) if not re.search(r"[;!{}\n]", word)]
    return "".join(f"```{{index}} ! single: {word}\n```\n\n" for word in plain)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; bars in cells are escaped."""
    lines = [list(header), ["---"] * len(header), *map(list, rows)]
    # chr(92) is a backslash: before Python 3.12 an f-string's expression may hold none.
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n"
        for line in lines
    )


def replaced(text: str, name: str, maker: str, made: str) -> str:
    """Return a page with what stands between the marks of ``name`` made anew."""
    begin, end = f"<!-- {name}: {maker} -->", f"<!-- /{name} -->"
    between = re.compile(rf"(?s){re.escape(begin)}.*?{re.escape(end)}")
    # A function, since re would read backslashes in a text as escapes.
    return between.sub(lambda _found: f"{begin}\n\n{made}\n\n{end}", text)
