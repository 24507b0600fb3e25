"""A reason is told of no release that it does not hold for, and one output never contradicts."""

import contextlib
import itertools

import pytest

from patchkit.errors import DriftError, HostError, UsageError
from patchkit.patching.recipe import load_recipe
from patchkit.runtime.node.cluster_env import make_cluster_env
from patchkit.runtime.rules.presets import load_flag_rules, load_presets
from patchkit.runtime.rules.releases import within
from patchkit.runtime.rules.rule import adapt_to_release, load_variable_rules
from tools import serve_lines

RELEASES = tuple(map(str, load_recipe("vllm").supported))
STOPS = "Unknown SF transformation"


def entries():
    flags, variables = load_flag_rules(), load_variable_rules()
    every = (flags.rules, flags.leave_out, flags.advice)
    every += (variables.rules, variables.avoids, variables.advice)
    return itertools.chain.from_iterable(every)


RANGES = {text: bounds for row in entries() for bounds, text in row.by_release.items()}


def words_of(preset, version):
    """Return all reasons of a preset's command and env in a release, and the env's variables."""
    asked = {"model": preset.id if "/" in preset.id else f"some/{preset.id}"}
    asked |= {} if preset.single else {**serve_lines.TWO, "nodes": preset.nodes}
    served = serve_lines.served(version, asked)
    env = make_cluster_env(
        served.request.node, serve_lines.NOWHERE, load_variable_rules(), ptxas="/x"
    )
    texts = [*served.notes, *(row.says for row in served.advice)]
    texts += [flag.reason for flag in served.flags] + [
        row.reason for row in env.settings
    ]
    return texts, {row.name: row.value for row in env.settings}


@pytest.mark.parametrize("version", RELEASES)
def test_no_reason_is_told_outside_its_range(version):
    seen = 0
    for preset in load_presets():
        with contextlib.suppress(UsageError, HostError, DriftError):
            texts, variables = words_of(preset, version)
            seen += 1
            wrong = [
                text for text in texts if not within(version, RANGES.get(text, ""))
            ]
            assert not wrong, (preset.id, version)
            told = " ".join(texts)
            assert (STOPS in told) <= version.startswith(("0.24.", "0.27.")), (
                preset.id,
                version,
            )
            # Who is told that a model is served by DeepGEMM is not told to turn it off.
            if "by FlashInfer and DeepGEMM" in told:
                assert "VLLM_USE_DEEP_GEMM" not in variables, (preset.id, version)
    assert seen


@pytest.mark.parametrize(
    "entry", [row for row in entries() if row.by_release], ids=lambda it: it.id
)
def test_what_is_said_by_release(entry):
    plain = getattr(entry, entry.text_field)
    for version in RELEASES:
        texts = [
            text for bounds, text in entry.by_release.items() if within(version, bounds)
        ]
        assert len(texts) <= 1
        assert (
            getattr(adapt_to_release(entry, version), entry.text_field)
            == (texts or [plain])[0]
        )
    assert adapt_to_release(entry, "") is entry
