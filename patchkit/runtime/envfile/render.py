"""Render an env file, with a reason above each line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from patchkit.errors import UsageError
from patchkit.runtime.envfile.header import BLANK, MARK, facts, sealed
from patchkit.runtime.envfile.syntax import (
    EnvEntry,
    Format,
    assignment,
    check,
    comment,
    one_line,
    refers,
)
from patchkit.runtime.rules.sensitive_names import is_secret


def render(kind: Format, header: Sequence[str], entries: Sequence[EnvEntry]) -> str:
    """Return a whole file. ``header`` is facts (``role=head vllm=0.25.1 …``), then lines to read.

    Raises UsageError for what the format cannot hold.
    """
    first, *about = header or [""]
    # This also checks them: a fact that could not be read back is refused here.
    known = facts(first) | {"format": str(kind)}
    names = [entry.name for entry in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"{', '.join(twice)}: set twice in one file")
    if kind is Format.JSON:
        return sealed(_render_json(known, about, entries))
    return sealed(_render_lines(kind, known, about, entries))


def _render_lines(
    kind: Format, known: dict[str, str], about: Sequence[str], entries: Sequence[EnvEntry]
) -> str:
    first = " ".join(f"{name}={value}" for name, value in known.items())
    head = [f"# {MARK} {first} digest={BLANK}", *(row for line in about for row in comment(line))]
    blocks = [[*comment(entry.comment), assignment(kind, entry)] for entry in entries]
    return "\n\n".join("\n".join(block) for block in [head, *blocks]) + "\n"


def _render_json(known: dict[str, str], about: Sequence[str], entries: Sequence[EnvEntry]) -> str:
    for entry in entries:
        check(Format.JSON, entry)
    secrets = [entry.name for entry in entries if is_secret(entry.name)]
    content: dict[str, Any] = {
        "header": {"digest": BLANK, **known},
        "about": list(map(one_line, about)),
        "variables": {each.name: each.value for each in entries if each.name not in secrets},
        "reasons": {each.name: one_line(each.comment) for each in entries if each.comment},
        "secrets": {name: refers(name) for name in secrets},
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
