"""Enter the variables that NCCL's sources read in recipes/env/nccl_variables.tsv."""

from __future__ import annotations

import re
from pathlib import Path

# NCCL_PARAM(Name, "NAME", default) reads NCCL_NAME; getenv, and names in tables, are quoted whole.
_PARAM = re.compile(
    r'NCCL_PARAM\(\s*\w+,\s*"(?P<name>\w+)",\s*(?P<default>[^)]*?)\s*\)'
)
_QUOTED = re.compile(r'"(?P<name>NCCL_[A-Z0-9_]+)"')
_SOURCES = (".c", ".cc", ".cu", ".h")


def read_names(folder: Path) -> dict[str, str]:
    """Return name → default of everything that the sources below a folder read; "" for none."""
    found: dict[str, str] = {}
    for place in sorted(folder.rglob("*")):
        if place.suffix in _SOURCES and place.is_file():
            text = place.read_text(encoding="utf-8", errors="replace")
            found |= {
                f"NCCL_{match['name']}": match["default"]
                for match in _PARAM.finditer(text)
            }
            for match in _QUOTED.finditer(text):
                found.setdefault(match["name"], "")
    return found


def with_names(table: str, version: str, root: Path) -> str:
    """Carry the rows of the newest release on to the next one, and add what it brings.

    Plugins that come with the sources as examples count. The head of the table names the release.
    """
    lines = table.splitlines()
    head = [line for line in lines if line.startswith("#")]
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    # The second line of the head ends with the releases that were read: …, 2.29.7.
    previous = head[1].rstrip(".").rpartition(", ")[2]
    own = read_names(root)
    latest = {row[0]: row for row in rows if row[2] == previous}
    for name, row in latest.items():
        # A default that is computed elsewhere is not read here, and stays what it was.
        if name in own and own[name] in ("", row[3]):
            row[2] = version
    rows += [
        [name, version, version, default]
        for name, default in own.items()
        if name not in latest or latest[name][2] != version
    ]
    head[1] = f"{head[1].rstrip('.')}, {version}."
    ordered = sorted(rows, key=lambda row: row[0])
    return "\n".join([*head, *("\t".join(row) for row in ordered), ""])
