"""What people wrote by hand: links that lead somewhere, and the facts that a recipe may change."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from patchkit.durable.signals import SIGNALS
from patchkit.errors import PatchkitError

ROOT = Path(__file__).parents[3]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#]*)(?:#(?P<anchor>[^)]*))?\)")
HEADING = re.compile(r"^#+ (.*)", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    titles = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.skipif(not (ROOT / "recipes").exists(), reason="an sdist has recipes/ in patchkit/")
def test_links_lead_somewhere():
    wrong = []
    for page in PAGES:
        for link in LINK.finditer(page.read_text(encoding="utf-8")):
            place = page.parent / link["path"] if link["path"] else page
            if not place.exists() or (link["anchor"] and link["anchor"] not in anchors(place)):
                wrong.append((page.name, link[0]))
    assert wrong == []


def test_every_page_is_reached_from_the_readme():
    reached, ahead = set(), {ROOT / "README.md"}
    while ahead:
        page = ahead.pop()
        reached.add(page)
        paths = [link["path"] for link in LINK.finditer(page.read_text(encoding="utf-8"))]
        linked = {(page.parent / path).resolve() for path in paths if path.endswith(".md")}
        ahead |= linked - reached
    assert {*PAGES} - reached == {ROOT / "CHANGELOG.md"}


def test_exit_codes_are_those_of_the_errors():
    rows = re.findall(
        r"^\| ([\d, ]+) \|", (ROOT / "docs/commands.md").read_text("utf-8"), re.MULTILINE
    )
    ahead, codes = [PatchkitError], {0}
    while ahead:
        kind = ahead.pop()
        codes.add(kind.exit_code)
        ahead += kind.__subclasses__()
    interrupted = {128 + each for each in (*SIGNALS, signal.SIGPIPE)}
    assert {int(code) for row in rows for code in row.split(",")} == codes | interrupted
