"""Rules, fixes and what `explain` says of guides' claims: one truth for each variable and flag.

They are written in four files, and a setting that is named in two of them must not be good in one
and bad in the other.
"""

import re
from typing import NamedTuple

from patchkit.patching.recipe import load_claims
from patchkit.runtime.rules.presets import flags, load_flag_rules, load_presets
from patchkit.runtime.rules.releases import (
    nccl_variables,
    other_variables,
    vllm_variables,
    within,
)
from patchkit.runtime.rules.rule import Condition, load_variable_rules
from support.selection import SUPPORTED

RULES, FLAGS, CLAIMS = load_variable_rules(), load_flag_rules(), load_claims("vllm")
NUMBER = re.compile(r"\d+(?:\.\d+)*")
VARIABLE = re.compile(r"\b([A-Z][A-Za-z0-9]*_[A-Za-z0-9_]+)=([^\s,;:.`()]+)")
OF_PATCHKIT = {"--executor", "--version", "--vllm", "--with", "--without"}
# Upstream's own word, for a model that writes many tokens at once.
DIFFERENT = ("nvidia/diffusiongemma-26B-A4B-it-NVFP4",)
FLAG = re.compile(r"(--[a-z][a-z0-9-]+)[ =]([A-Za-z0-9_.]+)")


def settings(text):
    """Every NAME=value and --flag value of a sentence; commands in backticks are patchkit's."""
    text = re.sub(r"`[^`]*`", "", text)
    found = {*VARIABLE.findall(text), *FLAG.findall(text)}
    return {(name, value.rstrip(".")) for name, value in found}


class Said(NamedTuple):
    """What is written, advised or advised against; ``when`` is the condition of who says it."""

    name: str
    value: str
    who: str
    when: Condition


def written():
    """What rules and presets write, and what texts tell people to write."""
    for rule in RULES.rules:
        yield from (Said(*pair, rule.id, rule.when) for pair in rule.set.items())
    yield from (Said(rule.flag, rule.value, rule.id, rule.when) for rule in FLAGS.rules)
    for preset in load_presets():
        when = {"vllm": f">={preset.min_vllm}", "quantization": preset.quantization}
        pairs = {**preset.variables, **preset.flags}.items()
        yield from (Said(name, str(value), preset.id, when) for name, value in pairs)
    for entry in (*RULES.avoids, *RULES.advice, *FLAGS.advice):
        yield from (
            Said(*pair, entry.id, entry.when) for pair in settings(entry.instead)
        )
    for claim in CLAIMS:
        yield from (Said(*pair, claim.id, {}) for pair in settings(claim.instead))


def discouraged():
    """What should not be set, with what matches its values."""
    for avoid in RULES.avoids:
        yield from (
            (Said(name, "", avoid.id, avoid.when), avoid) for name in avoid.variables
        )


def overlap(one, other):
    """Return whether two conditions can hold together; ranges are tried at their bounds."""
    for key in one.keys() & other.keys():
        both = (one[key], other[key])
        if key in ("vllm", "torch", "triton", "nccl", "nodes"):
            edges = [
                "0",
                "99",
                *(each for bounds in both for each in NUMBER.findall(str(bounds))),
            ]
            # A bound and what lies right behind it.
            tried = [*edges, *(f"{edge}.0.1" for edge in edges)]
            if not any(
                all(within(each, str(bounds)) for bounds in both) for each in tried
            ):
                return False
        elif not set.intersection(*({v} if isinstance(v, str) else {*v} for v in both)):
            return False
    return True


def test_nothing_is_written_or_advised_that_another_text_is_against():
    contradictions = [
        f"{yes.who} says {yes.name}={yes.value}, {no.who} is against it"
        for yes in written()
        for no, entry in discouraged()
        if yes.name == no.name
        and entry.matches(yes.value)
        and overlap(yes.when, no.when)
    ]
    assert contradictions == []


def test_nothing_is_written_where_a_claim_says_that_it_does_not_help():
    """A claim that is outdated held for its releases; one that is false held for none."""
    for claim in CLAIMS:
        refused = {*VARIABLE.findall(claim.says)}
        # Of other flags claims say what happens with them, not that they help.
        refused |= {
            pair for pair in FLAG.findall(claim.says) if pair[0].endswith("-backend")
        }
        over = {
            "false": SUPPORTED,
            "outdated": [
                each for each in SUPPORTED if not within(each, claim.versions)
            ],
        }
        wrong = [
            (claim.id, version, each)
            for each in written()
            if (each.name, each.value) in refused and each.who not in DIFFERENT
            for version in over.get(claim.verdict, ())
            if overlap(each.when, {"vllm": f"=={version}"})
        ]
        assert wrong == []


def test_a_false_claim_about_a_variable_is_found_in_files_as_well():
    """Who asks `explain` and who asks `check` get the same answer."""
    silent = [
        f"{claim.id}: {name}={value}"
        for claim in CLAIMS
        if claim.verdict == "false"
        for name, value in VARIABLE.findall(claim.says)
        if not any(
            name in each.variables and each.matches(value) for each in RULES.avoids
        )
    ]
    assert silent == []


def test_every_setting_that_is_named_exists():
    names = {*vllm_variables(""), *nccl_variables(""), *other_variables()}
    names |= {name for version in SUPPORTED for name in flags(version)}
    told = {each.name.partition(".")[0] for each in written()}
    assert sorted(told - names - OF_PATCHKIT) == []
