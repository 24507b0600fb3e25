"""Check that every symptom is recognised by its examples, and real failures by their causes."""

from __future__ import annotations

import re
import sys
import tomllib
from collections import Counter

import pytest

from patchkit.doctor.symptoms.diagnosis import read_log
from patchkit.doctor.symptoms.symptom import symptom_files, symptoms
from patchkit.runtime.rules.condition import check_condition
from support.failures import VERDICTS, matrix, recognised

EXAMPLES = [(entry.id, text) for entry in symptoms().values() for text in entry.example]
OTHERS = [(entry.id, text) for entry in symptoms().values() for text in entry.other]


def test_ids_are_unique():
    ids = [
        entry["id"]
        for file in symptom_files()
        for entry in tomllib.loads(file.read_text())["symptom"]
    ]
    assert [each for each, count in Counter(ids).items() if count > 1] == []


@pytest.mark.parametrize(("symptom", "text"), EXAMPLES)
def test_examples_are_recognised(symptom, text):
    assert symptom in recognised(text, {})


@pytest.mark.parametrize(("symptom", "text"), OTHERS)
def test_near_texts_are_something_else(symptom, text):
    assert symptom not in recognised(text, {})


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


@pytest.mark.parametrize(
    ("vllm", "first"), [("0.11.0", "page-cache"), ("0.25.1", "held-or-too-much")]
)
def test_the_page_cache_counts_in_old_releases_alone(vllm, first):
    text = "ValueError: Free memory on device cuda:0 (33.99/121.63 GiB) on startup is less than "
    text += "desired GPU memory utilization (0.83, 100.95 GiB)."
    known = {"page_cache": "large", "target": "gb10", "vllm": vllm}
    (diagnosis,) = read_log([text.encode()], known).diagnoses
    assert diagnosis.causes[0].id == first


def test_real_failures():
    """Print how real failures are judged, and hold the least that counts."""
    counts, wrong = matrix()
    sys.stdout.write("\n".join([*(f"{name}: {counts[name]}" for name in VERDICTS), *wrong, ""]))

    missed = counts["other"] + counts["nothing"]
    assert missed <= 0.15 * counts.total(), wrong
    assert counts["right"] >= 0.9 * (counts["right"] + counts["wrong"]), wrong
