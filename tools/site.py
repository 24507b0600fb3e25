"""Build the documentation as a site with search: README, the pages of docs/, the reference.

    python -m tools.site FOLDER

The reference (fixes, support matrix, rules, flags, symptoms) is made from the data that patchkit
itself reads, in FOLDER/pages; Sphinx makes FOLDER/html of all pages, and every warning of it, a
link that leads nowhere among them, is an error.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from patchkit.patching.recipe import load_recipes, load_support
from patchkit.runtime.rules.presets import load_flag_rules, load_presets
from patchkit.runtime.rules.rule import load_variable_rules
from tools import env_pages, serve_pages, symptom_pages
from tools.catalogue import catalogue

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_SETTINGS = """\
project = "patchkit"
extensions = ["myst_parser", "sphinx_copybutton"]
copybutton_exclude = ".linenos, .gp, .go"
html_theme = "furo"
html_title = "patchkit"
html_copy_source = False
myst_heading_anchors = 4
smartquotes = False # what is pasted into a shell stays as it is
"""
_LINK = re.compile(
    r"(!?)\[(?P<text>[^\]]*)\]\((?P<path>(?!https?:)[^)#]+)(?P<anchor>#[^)]*)?\)"
)
_QUESTIONS = "questions.md"  # docs/README.md
_HEADING = re.compile(r"^## (.*)$", re.MULTILINE)


def reference_pages() -> dict[str, str]:
    """Return path below ``reference/`` → text of each page that is made from data."""
    pages = {
        "env-rules.md": env_pages.page(load_variable_rules()),
        "serve-flags.md": serve_pages.page(load_flag_rules(), load_presets()),
        **symptom_pages.pages(),
    }
    for recipe in load_recipes():
        pages |= catalogue(recipe, load_support(recipe.project))
    return pages


def write_pages(folder: Path) -> None:
    """Write all pages and Sphinx's settings into a folder."""
    made = reference_pages()
    texts = {path.name: path.read_text(encoding="utf-8") for path in DOCS.glob("*.md")}
    questions = texts.pop("README.md")
    texts |= {f"reference/{name}": text for name, text in made.items()}
    texts[_QUESTIONS] = questions
    texts["index.md"] = first_page() + contents_of(questions, reference_order(made))
    texts["conf.py"] = _SETTINGS
    for name, text in texts.items():
        text = text.replace("```mermaid", "```text")  # the code host draws it
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            inner_links(text, folder / name, folder, texts), encoding="utf-8"
        )
    for picture in DOCS.rglob("*.svg"):
        copy = folder / picture.relative_to(DOCS)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(picture, copy)


def inner_links(text: str, file: Path, folder: Path, pages: Mapping[str, str]) -> str:
    """Return a text whose links to files that are no page of the site are the files' names."""

    def replace(link: re.Match[str]) -> str:
        target = (file.parent / link["path"]).resolve()
        name = str(target.relative_to(folder)) if target.is_relative_to(folder) else ""
        if name == "README.md":
            return f"[{link['text']}](/{_QUESTIONS}{link['anchor'] or ''})"
        if target == folder.parent / "README.md":
            return f"[{link['text']}](/index.md{link['anchor'] or ''})"
        if name in pages or name.endswith(".svg"):
            return link[0]
        return f"{link['text']} (`{target.name}`)"

    return text if file.suffix != ".md" else _LINK.sub(replace, text)


def first_page() -> str:
    """Return README as the site's first page: its links lead from the folder of the pages."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text.replace("](docs/", "](").replace("](README.md", f"]({_QUESTIONS}")


def contents_of(questions: str, reference: list[str]) -> str:
    """Return the site's contents: the sections of docs/README.md with the pages they lead to.

    The section "Reference" has the pages that are made from data as well.
    """
    listed = {_QUESTIONS}
    parts = [_contents("All questions", [_QUESTIONS])]
    titles = _HEADING.findall(questions)
    for title, section in zip(titles, _HEADING.split(questions)[2::2], strict=True):
        paths = [link["path"] for link in _LINK.finditer(section)]
        pages = [
            path
            for path in dict.fromkeys(paths)
            if "/" not in path and path not in listed
        ]
        listed.update(pages)
        parts.append(_contents(title, pages + reference * (title == "Reference")))
    return "".join(parts)


def reference_order(names: Iterable[str]) -> list[str]:
    """Return the pages of the reference for the contents: overviews first."""
    return [
        f"reference/{name}"
        for name in sorted(names, key=lambda name: ("/" in name, name))
    ]


def _contents(title: str, pages: Iterable[str]) -> str:
    lines = "\n".join(page.removesuffix(".md") for page in pages)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{lines}\n```\n"


def main(folder: Path) -> int:
    """Write the pages and run Sphinx; return its exit status."""
    pages, html = folder / "pages", folder / "html"
    shutil.rmtree(folder, ignore_errors=True)
    pages.mkdir(parents=True)
    write_pages(pages)
    command = (sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q")
    return subprocess.run([*command, str(pages), str(html)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
