"""Values of variables beside the releases themselves: their own ``envs.py``, executed."""

import os
from collections import defaultdict
from types import SimpleNamespace

import pytest

from patchkit.patching.workspace import open_workspace
from patchkit.proof.upstream_code import Anything, Code
from patchkit.recipes.vllm.decisions import Settings
from patchkit.runtime.rules.presets import load_presets
from patchkit.runtime.rules.releases import within
from patchkit.runtime.rules.rule import load_variable_rules
from patchkit.runtime.rules.variable_values import INTEGER, NUMBER, SEVERAL, vllm_values
from tools.release_values import read_values

pytestmark = [
    pytest.mark.releases,
    pytest.mark.usefixtures("run_here"),
    pytest.mark.filterwarnings(
        "ignore:.*VLLM_:FutureWarning"
    ),  # the end of some is announced
]
NONSENSE = "none of these"


@pytest.fixture(scope="module")
def stops(release, version):
    """Whether the release's envs.py stops at a value: ``stops("VLLM_PORT", "x")``."""
    tree = open_workspace(release(version), "vllm").tree
    variables: dict[str, str] = {}
    code = Code(tree, {})
    code.names = {
        "os": SimpleNamespace(
            **{**vars(os), "environ": variables, "getenv": variables.get}
        ),
        "logger": Anything("logger"),
        # Choices that another file lists, and which torch it is: `__import__("torch").version`.
        "__import__": lambda module, fromlist=(): SimpleNamespace(
            version=SimpleNamespace(hip=None),
            **{
                each: code.get(f"{module.replace('.', '/')}.py", each)
                for each in fromlist
            },
        ),
    }
    settings = Settings(code, variables)
    # Some defaults are other variables of the module, which asks for itself.
    code.names["sys"] = SimpleNamespace(modules=defaultdict(lambda: settings))

    def ask(name, value):
        variables.clear()
        variables[name] = value
        try:
            getattr(settings, name)
        except ValueError:
            return True
        return False

    return ask


def test_the_table_says_what_a_release_takes(version, release):
    assert vllm_values(version) == read_values(release(version) / "vllm")


def test_a_release_takes_what_the_table_says_and_nothing_else(stops, version):
    for name, takes in vllm_values(version).items():
        right = (
            takes.words or {INTEGER: ("0", "1", "-1"), NUMBER: ("0.5", "2")}[takes.how]
        )
        wrong = [NONSENSE, *(["true", "1.5"] if takes.how == INTEGER else [])]
        wrong += [] if takes.how == SEVERAL else [""]
        wrong += [word.swapcase() for word in takes.words]
        for value in {*right, *wrong}:
            assert stops(name, value) is not takes.allows(value), (name, value)


def written(version):
    """Every NAME, value that rules and presets can write for a release."""
    rules = load_variable_rules().rules
    for rule in rules:
        if within(version, str(rule.when.get("vllm", ""))):
            yield from rule.set.items()
    for preset in load_presets():
        if within(version, f">={preset.min_vllm}"):
            yield from preset.variables.items()


def test_a_release_takes_every_value_that_is_written(stops, version):
    values = {pair for pair in written(version) if pair[0].startswith("VLLM_")}
    assert len(values) > 2
    assert [pair for pair in values if "{" not in pair[1] and stops(*pair)] == []
