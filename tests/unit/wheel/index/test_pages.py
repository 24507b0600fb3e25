"""Pages of an index say of a wheel what it is, whatever characters its name and metadata have."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from patchkit.digests import digest
from patchkit.wheel.file.name import WheelName
from patchkit.wheel.index.pages import OfferedWheel, project_pages, root_pages

# A file name that wheel_name lets pass is tamer; what is escaped here holds for any.
TEXT = st.text(st.characters(blacklist_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), min_size=1)


class Page(HTMLParser):
    """The links of a page and their texts, and every tag that is in it."""

    def __init__(self, text):
        super().__init__()
        self.links, self.texts, self.tags = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "a":
            self.links.append(dict(attrs))

    def handle_data(self, data):
        if self.lasttag == "a" and data.strip():
            self.texts.append(data)


def offered(filename, python, metadata=b""):
    name = WheelName(
        filename=filename, project="p", version=Version("1.0"), tag="", cpus=frozenset()
    )
    return OfferedWheel(
        path=Path("p"),
        name=name,
        sha256="0" * 64,
        size=len(filename),
        requires_python=python,
        metadata=metadata,
    )


@given(st.dictionaries(TEXT, TEXT, min_size=1, max_size=3), st.binary())
def test_names_and_fields_come_back_as_they_were(wheels, metadata):
    pages = project_pages([offered(name, python, metadata) for name, python in wheels.items()])
    page = Page(pages["index.html"])
    assert {*page.tags} == {"html", "head", "meta", "title", "body", "h1", "a", "br"}
    said = {}
    for link in page.links:
        address, _, fragment = link["href"].partition("#")
        said[unquote(address)] = link["data-requires-python"]
        assert fragment == f"sha256={'0' * 64}"
        assert link["data-core-metadata"] == f"sha256={digest(metadata)}"
    assert said == wheels
    files = json.loads(pages["index.json"])["files"]
    assert {unquote(file["url"]): file["requires-python"] for file in files} == wheels
    assert [file["size"] for file in files] == [len(name) for name in sorted(wheels)]


def test_the_order_of_what_is_given_does_not_matter():
    wheels = [offered(name, "") for name in ("b", "a", "c")]
    assert project_pages(wheels) == project_pages(wheels[::-1])
    assert root_pages(["b", "a"]) == root_pages(["a", "b"])
    assert "requires-python" not in project_pages(wheels)["index.json"]
