"""Write the pages of a simple index, as HTML (PEP 503) and as JSON (PEP 691).

Every address in them is relative, so that the folder can be served from anywhere. The same wheels
give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from patchkit.digests import digest
from patchkit.wheel.file.name import WheelName

HTML, JSON = "index.html", "index.json"
_API = "1.1"  # PEP 700: the first version with sizes
_PAGE = """\
<!DOCTYPE html>
<html>
  <head>
    <meta charset="utf-8">
    <meta name="pypi:repository-version" content="{api}">
    <title>{title}</title>
  </head>
  <body>
    <h1>{title}</h1>
{links}  </body>
</html>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedWheel:
    """A wheel as an index offers it: sha256 in hex, size in bytes, the bytes of its METADATA.

    ``path`` is where a wheelhouse has it.
    """

    path: Path
    name: WheelName
    sha256: str
    size: int
    requires_python: str
    metadata: bytes


def project_pages(wheels: Collection[OfferedWheel]) -> dict[str, str]:
    """Return the pages of one project by file name; its wheels lie beside them.

    Beside each wheel lies its METADATA, under the wheel's name and ``.metadata`` (PEP 658).
    """
    ordered = sorted(wheels, key=lambda wheel: wheel.name.filename)
    project = ordered[0].name.project
    page = {
        "meta": {"api-version": _API},
        "name": project,
        "versions": [str(each) for each in sorted({wheel.name.version for wheel in ordered})],
        "files": [_fields(wheel) for wheel in ordered],
    }
    return {HTML: _html(f"Links for {project}", [*map(_link, ordered)]), JSON: _json(page)}


def root_pages(projects: Collection[str]) -> dict[str, str]:
    """Return the pages that list the projects, by file name."""
    ordered = sorted(projects)
    page = {
        "meta": {"api-version": _API},
        "projects": [{"name": project} for project in ordered],
    }
    links = [f'<a href="{quote(project)}/">{escape(project)}</a>' for project in ordered]
    return {HTML: _html("Simple index", links), JSON: _json(page)}


def _fields(wheel: OfferedWheel) -> dict[str, Any]:
    metadata = {"sha256": digest(wheel.metadata)}
    return {
        "filename": wheel.name.filename,
        "url": quote(wheel.name.filename),
        "hashes": {"sha256": wheel.sha256},
        "size": wheel.size,
        **({"requires-python": wheel.requires_python} if wheel.requires_python else {}),
        # PEP 714: the second is what older installers look for.
        "core-metadata": metadata,
        "dist-info-metadata": metadata,
    }


def _link(wheel: OfferedWheel) -> str:
    name, sha256 = wheel.name.filename, digest(wheel.metadata)
    python = escape(wheel.requires_python)
    attributes = [
        # The + of a local version is a blank to some servers.
        f'href="{quote(name)}#sha256={wheel.sha256}"',
        *([f'data-requires-python="{python}"'] if python else []),
        f'data-core-metadata="sha256={sha256}"',
        f'data-dist-info-metadata="sha256={sha256}"',
    ]
    return f"<a {' '.join(attributes)}>{escape(name)}</a>"


def _html(title: str, links: Sequence[str]) -> str:
    lines = "".join(f"    {link}<br>\n" for link in links)
    return _PAGE.format(api=_API, title=escape(title), links=lines)


def _json(page: dict[str, Any]) -> str:
    return json.dumps(page, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
