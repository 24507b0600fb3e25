"""Write the reference of symptoms: recipes/symptoms/, under the words that programs print."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator

from patchkit.doctor.symptoms.symptom import SYMPTOM_FILES, Cause, Symptom, symptoms
from patchkit.runtime.rules.rule import describe_condition
from support.failures import VERDICTS, matrix
from tools.markdown import index, replaced, table

MADE = "<!-- Made by tools/regenerate.py from recipes/symptoms/. Do not edit. -->\n"
INTRODUCTION = """\
What programs print when vLLM does not run as it should on a DGX Spark, why, and what cures it. In a
text, `{}` and `{name}` stand for one word and `...` for anything. Ask by the words that you met:

    patchkit explain "the line that you have"
    patchkit doctor --log FILE

Where a text has several causes, `doctor` decides by the facts of the machine, and says so where it
cannot. *Evidence*: measured, compiled, read in the source code, documented by its maker, reported
by several users or by one, inferred. Nothing here was tried on a GB10 by this project.
"""


def pages() -> dict[str, str]:
    """Return path → text: a page for each file of symptoms, and one that leads to them."""
    found = {}
    lines = []
    for file in SYMPTOM_FILES:
        text = file.read_text(encoding="utf-8")
        # The first comment of a file says what it is about.
        title = text.partition("\n")[0].removeprefix("# ").rstrip(".")
        entries = tomllib.loads(text)["symptom"]
        sections = ["\n".join(_section(symptoms()[entry["id"]])) for entry in entries]
        found[f"symptoms/{file.stem}.md"] = "\n".join([f"{MADE}# {title}\n", *sections])
        lines.append(f"- [{title}](symptoms/{file.stem}.md): {len(entries)}")
    heading = f"{MADE}# What does this error mean?\n\n{INTRODUCTION}"
    return {"symptoms.md": "\n".join([heading, *lines]) + "\n", **found}


def accuracy(text: str) -> str:
    """Return docs/doctor.md with the table of how real failures are judged."""
    counts, _wrong = matrix()
    rows = [(meaning, str(counts[name])) for name, meaning in VERDICTS.items()]
    made = table((f"of {counts.total()} failures", "number"), rows).rstrip("\n")
    return replaced(text, "accuracy", "python -m tools.regenerate", made)


def _section(symptom: Symptom) -> Iterator[str]:
    yield f"## {symptom.title}\n"
    yield index(symptom.says)
    yield "\n".join(["```text", *symptom.says, "```", ""])
    if symptom.level == "note":
        yield "Nothing to worry about.\n"
    if symptom.follows:
        yield "This follows from another error: look before it.\n"
    for cause in symptom.cause:
        yield f"- {_cause(cause)}"
    yield f"\n`patchkit explain {symptom.id}`\n"


def _cause(cause: Cause) -> str:
    where = f" ({describe_condition(cause.when)})" if cause.when else ""
    command = f" `{cause.command}`" if cause.command else ""
    costs = f" It costs {cause.costs}." if cause.costs else ""
    evidence = f"*{cause.evidence}, {cause.confidence}: {cause.source}*"
    return f"{cause.cause}{where} **Cure:** {cause.cure}{command}{costs} {evidence}"
