"""Write objects as YAML that every reader takes alike.

PyYAML leaves unquoted what is a text by its own rules; Kubernetes reads YAML with another library,
to which ``1e3`` is a number and ``y`` is true. So every text is quoted unless it cannot be meant
otherwise. What stands in quotes is ASCII, without line breaks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from patchkit.errors import UsageError
from patchkit.quoting import visible

_WIDE = 1 << 20  # columns: a text is not folded

# Words of letters alone, and names of labels, are read as nothing else, but for these.
_WORD = re.compile(r"[A-Za-z]+(?:[./-][A-Za-z]+)*")
_KEY = re.compile(r"[A-Za-z][A-Za-z0-9./_-]*[A-Za-z]")
_MEANT = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"))
_LINES = re.compile(r"(?:(?: *[!-~](?:[ -~]*[!-~])?)?\n)+")


class _Writer(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types here
    def ignore_aliases(self, _data: object) -> bool:
        """Write each value where it stands: an anchor is one more thing to know."""
        return True


def _text(writer: _Writer, text: str) -> yaml.ScalarNode:
    style: str | None = '"'
    if _LINES.fullmatch(text) and not text.startswith((" ", "\n")) and not text.endswith("\n\n"):
        style = "|"
    elif _WORD.fullmatch(text) and text.lower() not in _MEANT:
        style = None
    return writer.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _mapping(writer: _Writer, mapping: dict[str, Any]) -> yaml.MappingNode:
    pairs = []
    for key, value in mapping.items():
        bare = _KEY.fullmatch(key) and key.lower() not in _MEANT
        named = yaml.ScalarNode("tag:yaml.org,2002:str", key, style=None if bare else '"')
        pairs.append((named, writer.represent_data(value)))
    return yaml.MappingNode("tag:yaml.org,2002:map", pairs, flow_style=False)


_Writer.add_representer(str, _text)
_Writer.add_representer(dict, _mapping)


def yaml_text(objects: Iterable[Mapping[str, Any]], comments: Iterable[str] = ()) -> str:
    """Return documents as YAML, below comments. Raises UsageError for what is not Unicode."""
    head = "".join(f"# {visible(line)}".replace("\n", " ").rstrip() + "\n" for line in comments)
    try:
        json.dumps(list(objects := tuple(objects)), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UsageError(
            "a name or a path is not Unicode", hint="Kubernetes takes none such: rename it"
        ) from None
    parts = [
        yaml.dump(dict(each), Dumper=_Writer, sort_keys=False, width=_WIDE) for each in objects
    ]
    return head + "---\n".join(parts)
