"""Pin a model's commit or an image in ``cluster.toml``; all other lines stay as they are."""

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

from patchkit.durable.atomic import replacing
from patchkit.durable.lock import locked
from patchkit.errors import UsageError, translated
from patchkit.reading import read_text

_PATIENCE = 10.0  # seconds to wait for another patchkit that writes there
_TABLE = "models"
_HEADER = re.compile(r"""(?m)^[ \t]*\[[ \t]*["']?models["']?[ \t]*\][ \t]*(?:#.*)?\n""")
_IMAGE = re.compile(
    r"""(?m)^([ \t]*(?:serve[ \t]*\.[ \t]*)?image[ \t]*=[ \t]*)(["'])([^"'\n]*)\2"""
)


def pin_model(path: Path, repo: str, commit: str) -> None:
    """Write the commit of a model into a cluster file, below ``[models]``.

    Raises UsageError if the file is not TOML, or if the edit of one line would not set the value
    and nothing else, as with a table that is written inline.
    """
    line = f"{json.dumps(repo)} = {json.dumps(commit)}"
    former = re.compile(
        rf"(?m)^[ \t]*[\"']{re.escape(repo)}[\"'][ \t]*=[ \t]*([\"'])[^\"'\n]*\1"
    )

    def write_line(text: str) -> str:
        if text and not text.endswith("\n"):
            text += "\n"
        if match := former.search(text):
            return text[: match.start()] + line + text[match.end() :]
        if header := _HEADER.search(text):
            return f"{text[: header.end()]}{line}\n{text[header.end() :]}"

        gap = "\n" if text.strip() else ""
        return f"{text}{gap}[{_TABLE}]\n{line}\n"

    _replace_value(path, _TABLE, repo, commit, write_line, line)


def pin_image(path: Path, image: str, *, former: bool = False) -> None:
    """Write an image into a cluster file instead of the one that the file names.

    With ``former`` the line with the old image stays above the new one, as a comment. Raises
    UsageError as ``pin_model`` does.
    """
    value = json.dumps(image)

    def write_value(match: re.Match[str]) -> str:
        comment = f"# {match[0].strip()}  # before --apply\n" if former else ""
        return f"{comment}{match[1]}{value}"

    def write_line(text: str) -> str:
        return _IMAGE.sub(write_value, text, count=1)

    _replace_value(path, "serve", "image", image, write_line, f"image = {value}")


def _replace_value(
    path: Path,
    table: str,
    name: str,
    value: str,
    change: Callable[[str], str],
    line: str,
) -> None:
    """Change the text of a file with ``change``, which has to set ``name`` in ``table``.

    Raises UsageError, and writes nothing, if the changed text sets another value or changes another
    key; the hint tells the user to write ``line``.
    """
    # Without the lock a patchkit that pins something else meanwhile could lose its line.
    with translated(at=path), locked(path.parent, patience=_PATIENCE):
        text = read_text(path)
        try:
            before = tomllib.loads(text)
            pins = before.get(table, {})
            if isinstance(pins, dict) and pins.get(name) == value:
                return

            changed = change(text)
            # The edit is one of text: the TOML in it has to set this value and nothing else.
            if tomllib.loads(changed) == {**before, table: {**pins, name: value}}:
                with replacing(path) as file:
                    file.write(changed.encode())
                return
        except (tomllib.TOMLDecodeError, TypeError):
            pass
    raise UsageError(
        f"{path}: {name} cannot be pinned in it",
        why=f"it is not TOML, or its table [{table}] is written in another way",
        hint=f"write below [{table}] by hand: {line}",
    )
