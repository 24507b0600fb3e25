"""Whether every symptom is recognised by its examples, and real failures by what they are."""

from __future__ import annotations

import re
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from patchkit.runtime.rules.condition import check_condition
from patchkit.runtime.symptoms.diagnosis import read_log
from patchkit.runtime.symptoms.symptom import symptom_files, symptoms

FAILURES = sorted((Path(__file__).parents[3] / "data" / "failures").glob("*.toml"))
EXAMPLES = [(entry.id, text) for entry in symptoms().values() for text in entry.example]
OTHERS = [(entry.id, text) for entry in symptoms().values() for text in entry.other]


@cache
def recognised(text, facts=()):
    """Return the symptoms of a text that need not be whole, with the causes that are left."""
    found = read_log([text.encode()], dict(facts), whole=False).diagnoses
    return {each.symptom.id: [cause.id for cause in each.causes] for each in found}


def test_ids_are_unique():
    ids = [
        entry["id"]
        for file in symptom_files()
        for entry in tomllib.loads(file.read_text())["symptom"]
    ]
    assert [each for each, count in Counter(ids).items() if count > 1] == []


@pytest.mark.parametrize(("symptom", "text"), EXAMPLES)
def test_examples_are_recognised(symptom, text):
    assert symptom in recognised(text)


@pytest.mark.parametrize(("symptom", "text"), OTHERS)
def test_near_texts_are_something_else(symptom, text):
    assert symptom not in recognised(text)


@pytest.mark.parametrize("entry", symptoms().values(), ids=lambda each: each.id)
def test_entries_say_what_they_need(entry):
    named = frozenset.intersection(*(each.names for each in entry.texts))
    for cause in entry.cause:
        check_condition(cause.when)
        for text in (cause.cause, cause.cure, cause.command, cause.tell):
            assert {*re.findall(r"\{([a-z_]+)\}", text)} <= named, f"{cause.id}: {text}"
        assert cause.cause.endswith(".")
        assert cause.cure.endswith(".")
    assert not entry.title.endswith(".")


def _failures():
    for file in FAILURES:
        yield from tomllib.loads(file.read_text())["failure"]


def test_real_failures(record_property):
    """Print and hold how many real failures are recognised, and how many causes are right."""
    rows = Counter()
    wrong = []
    for each in _failures():
        found = recognised(each["text"], tuple(each.get("facts", {}).items()))
        causes = found.get(each["symptom"])
        if causes is None:
            verdict = "something else" if found else "nothing"
        elif not each["cause"]:
            verdict = "cause unknown to its owner"
        else:
            named = causes == [each["cause"]]
            verdict = "right" if named else "among" if each["cause"] in causes else "wrong"
        rows[verdict] += 1
        if verdict in ("something else", "nothing", "wrong"):
            wrong.append(f"{each['id']}: {each['symptom']}/{each['cause']} is {found}")
    sys.stdout.write("\n".join([f"{dict(rows)}", *wrong, ""]))
    record_property("failures", dict(rows))
    total = sum(rows.values())
    missed = rows["something else"] + rows["nothing"]
    assert total - missed >= 0.85 * total, wrong
    assert rows["right"] >= 0.9 * (rows["right"] + rows["wrong"]), wrong
