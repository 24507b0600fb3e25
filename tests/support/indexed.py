"""Share among tests of an index the wheels that it is of, and the reading of its pages."""

from __future__ import annotations

from html.parser import HTMLParser

VLLM, NCCL = "0.25.1+cu130.gb10.ab12cd34ef", "2.28.9+gb10.abc123"
FACTS = {"target": "gb10"}
ALL = {"Leaf.Thing": "1.0", "nvidia-nccl-cu13": NCCL, "torch": "2.11.0", "vllm": VLLM}
JSON_TYPE = "application/vnd.pypi.simple.v1+json"


def files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class Links(HTMLParser):
    """The links of a page, with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "a":
            self.found.append(dict(attrs))
