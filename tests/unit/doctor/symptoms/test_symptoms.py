"""Check that every symptom is recognised by its examples, and real failures by their causes."""

import re
import sys
import tomllib

import pytest

from patchkit.doctor.symptoms.diagnosis import read_log
from patchkit.doctor.symptoms.symptom import (
    SYMPTOM_FILES,
    log_words,
    symptoms,
    text_pattern,
)
from patchkit.patching.recipe import load_claims, load_recipe
from patchkit.runtime.rules.rule import check_condition
from support.failures import VERDICTS, matrix, recognised


@pytest.mark.parametrize("file", SYMPTOM_FILES, ids=lambda file: file.stem)
def test_each_symptom_is_recognised_by_its_examples_alone(file):
    for entry in tomllib.loads(file.read_text())["symptom"]:
        missed = [
            text for text in entry["example"] if entry["id"] not in recognised(text, {})
        ]
        mistaken = [
            text
            for text in entry.get("other", ())
            if entry["id"] in recognised(text, {})
        ]
        assert (missed, mistaken) == ([], []), entry["id"]


def test_entries_say_what_they_need():
    files = [tomllib.loads(file.read_text())["symptom"] for file in SYMPTOM_FILES]
    assert len(symptoms()) == sum(map(len, files))  # each id is there once
    for entry in symptoms().values():
        assert entry.says, entry.id
        assert entry.example, entry.id
        names = [each.id for each in entry.cause]
        assert len({*names}) == len(names), entry.id
        # A cause without conditions holds where no other does: it comes last.
        conditions = [
            (it.when, it.matches, it.seen, it.either, it.unseen) for it in entry.cause
        ]
        assert all(any(each) for each in conditions[:-1]), entry.id
        given = set.intersection(
            *(
                {*re.compile(text_pattern(text).expression).groupindex}
                for text in entry.says
            )
        )
        for cause in entry.cause:
            check_condition(cause.when)
            quoted = {
                name
                for text in cause.seen
                for name in re.compile(text_pattern(text).expression).groupindex
            }
            texts = (cause.cause, cause.cure, cause.command, cause.tell)
            asked = {
                name for text in texts for name in re.findall(r"\{([a-z_]+)\}", text)
            }
            assert asked <= given | quoted, cause.id
            assert (cause.cause[-1], cause.cure[-1]) == (".", "."), cause.id
        assert not entry.title.endswith("."), entry.id


def test_a_line_of_the_kernel_is_never_about_a_container():
    for entry in symptoms().values():
        if re.search("NVRM|mlx5_core|kernel BUG|oom_reaper", " ".join(entry.says)):
            assert not any("container" in cause.when for cause in entry.cause), entry.id


def test_a_text_has_one_finding():
    texts = [text for entry in symptoms().values() for text in entry.example]
    for text in texts:
        by_line = {}
        for row in read_log([text.encode()], {}, whole=False).diagnoses:
            if row.is_root:
                assert by_line.setdefault(row.hit.number, row.symptom) == row.symptom


def _all_texts():
    for entry in symptoms().values():
        yield from entry.says
        for cause in entry.cause:
            yield from (*cause.seen, *cause.either, *cause.unseen)
    for texts in (*log_words().marks.values(), *(it.says for it in log_words().fact)):
        yield from texts


def test_each_text_can_be_looked_for():
    for text in _all_texts():
        pattern = text_pattern(text)
        re.compile(pattern.expression)  # an error where a name is there twice
        assert min(map(len, pattern.anchors)) >= 5, text
        assert all(it.isascii() and it.isprintable() for it in pattern.anchors), text
    for entry in symptoms().values():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry.id)
        for cause in entry.cause:
            re.compile(cause.matches)


def test_real_failures():
    """Print how real failures are judged, and hold the least that counts."""
    counts, wrong = matrix()
    sys.stdout.write(
        "\n".join([*(f"{name}: {counts[name]}" for name in VERDICTS), *wrong, ""])
    )
    missed = counts["other"] + counts["nothing"]
    assert missed <= 0.15 * counts.total(), wrong
    assert counts["right"] >= 0.9 * (counts["right"] + counts["wrong"]), wrong


def test_a_claim_that_nothing_confirms_is_said_alike_by_the_symptom():
    seen = set()
    for claim in load_claims("vllm"):
        for text in re.findall(r'"([^"]{12,})"', claim.says):
            for name in recognised(text, {}) if claim.verdict == "unverified" else ():
                seen.add(name)
                commands = {cause.command for cause in symptoms()[name].cause}
                assert f"patchkit explain {claim.id}" in commands, name
    assert seen == {"no-suitable-cutlass-kernel"}


def test_the_cure_of_a_missing_moe_config_is_one():
    (cause,) = symptoms()["moe-config-default"].cause
    assert cause.command == "patchkit repack vllm==0.33.0 --with moe_configs"
    assert "moe_configs" in {fix.id for fix in load_recipe("vllm").fixes}
    assert "docs/tune.md" in cause.cure


def test_ranks_that_drift_apart_while_they_tune_are_told_from_others():
    ended = (
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] {}\n"
    )
    module = "vllm/model_executor/warmup/kernel_warmup.py"
    frame = f'  File "{module}", line 90, in flashinfer_autotune\n'
    for text in (
        "Application timeout caused pair closure",
        "Connection closed by peer [10.0.0.2]",
    ):
        causes = [
            read_log([log.encode()], {}).diagnoses[0].causes[0].id
            for log in (frame + ended.format(text), ended.format(text))
        ]
        assert causes[0] == "autotune-drift"
        assert causes[1] != "autotune-drift"
