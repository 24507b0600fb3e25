"""Every fix: complete metadata, and examples that are true."""

import ast
import tomllib
from typing import get_args

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from patchkit.edit.python import parsed
from patchkit.edit.splice import splice
from patchkit.finding import Established
from patchkit.patching.fix import State
from patchkit.patching.recipe import load_recipes

RECIPES = load_recipes()
FIXES = [(recipe, fix) for recipe in RECIPES for fix in recipe.fixes]
EXAMPLES = [
    pytest.param(fix, example, id=f"{fix.id}-{example.version}-{example.arch}-{number}")
    for recipe in RECIPES
    for fix in recipe.fixes
    for number, example in enumerate(fix.examples)
]


def test_metadata_is_complete_and_needs_select_known_releases():
    for recipe, fix in FIXES:
        for text in (fix.title, fix.symptom, fix.why, fix.upstream):
            assert text == text.strip() != "", fix.id
        assert "\n" not in fix.title, fix.id
        assert len(fix.title) <= 80, fix.id
        assert fix.evidence, fix.id
        assert all(found.claim and found.source for found in fix.evidence), fix.id
        assert {row.established for row in fix.evidence} <= {*get_args(Established)}
        assert fix.majors, fix.id
        assert fix.look.__doc__, f"the docs print it: {fix.id}"
        assert fix.prove is None or fix.prove.__doc__, fix.id
        for need in fix.needs:
            assert any(map(need.covers, recipe.supported)), (
                f"{need.versions} covers no release"
            )
            assert need.reason, fix.id
        for arch in {need.arch or "native" for need in fix.needs}:
            ranges = [SpecifierSet(need.versions) for need in fix.needs_of(arch)]
            signs = {clause.operator for clauses in ranges for clause in clauses}
            assert signs & {">=", "=="}, (
                f"nothing says where {fix.id} starts for {arch}"
            )
        assert fix.examples, fix.id
        for example in fix.examples:
            assert Version(example.version) in recipe.supported, fix.id
            assert fix.need(Version(example.version), example.arch) is not None, fix.id


def test_the_evidence_of_a_recipe_is_about_its_fixes():
    for recipe in RECIPES:
        evidence = tomllib.loads((recipe.home / "evidence.toml").read_text())
        assert set(evidence) <= {fix.id for fix in recipe.fixes}


@pytest.mark.parametrize(("fix", "example"), EXAMPLES)
def test_an_example_leads_from_before_to_after(fix, example, make_tree, ask):
    request = ask(arch=example.arch)
    files = {**example.beside, example.path: example.before}
    there = {path: text for path, text in files.items() if text is not None}
    tree = make_tree(example.version, there)

    finding = fix.look(tree, request)

    assert finding.state is State.APPLY
    assert {edit.path for edit in finding.edits} == {example.path}
    assert all(edit.note for edit in finding.edits)
    assert splice(example.before or "", finding.edits) == example.after
    assert {edit.creates for edit in finding.edits} == {example.before is None}
    assert finding.reason
    assert finding.done
    assert finding.reason != finding.done
    pending = tree.with_texts({example.path: example.after})
    on_disk = make_tree(
        example.version, {**files, example.path: example.after}, name="done"
    )
    for patched in (pending, on_disk):
        again = fix.look(patched, request)
        assert (again.state, again.edits) == (State.APPLIED, ())
        assert again.reason
    if example.path.endswith(".py"):
        parsed(example.path, example.before)
        parsed(example.path, example.after)
        assert ast.dump(ast.parse(example.before)) != ast.dump(ast.parse(example.after))
    assert (example.before or "\n").endswith("\n")
    assert example.after.endswith("\n")
