"""Every fix: complete metadata, and examples that are true."""

from __future__ import annotations

import ast

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from patchkit.edit.python import check_syntax
from patchkit.edit.splice import splice
from patchkit.patching.fix import State
from patchkit.patching.recipe import load_recipes

RECIPES = load_recipes()
FIXES = [pytest.param(recipe, fix, id=fix.id) for recipe in RECIPES for fix in recipe.fixes]
EXAMPLES = [
    pytest.param(fix, example, id=f"{fix.id}-{example.version}-{example.arch}-{number}")
    for recipe in RECIPES
    for fix in recipe.fixes
    for number, example in enumerate(fix.examples)
]


def test_an_id_is_one_fix_in_all_recipes():
    names = [fix.id for recipe in RECIPES for fix in recipe.fixes]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.project)
def test_fixes_rest_on_known_fixes(recipe):
    names = [fix.id for fix in recipe.fixes]
    assert {name for fix in recipe.fixes for name in fix.requires} <= set(names)
    assert all(fix.id not in fix.requires for fix in recipe.fixes)


@pytest.mark.parametrize(("_recipe", "fix"), FIXES)
def test_metadata_is_complete(_recipe, fix):
    for text in (fix.title, fix.symptom, fix.why, fix.upstream):
        assert text == text.strip() != ""
    assert "\n" not in fix.title
    assert len(fix.title) <= 80
    assert fix.evidence
    for evidence in fix.evidence:
        assert evidence.claim
        assert evidence.source
    assert fix.majors
    assert fix.look.__doc__, "the docs print it"
    assert fix.prove is None or fix.prove.__doc__


@pytest.mark.parametrize(("recipe", "fix"), FIXES)
def test_needs_select_known_releases(recipe, fix):
    for need in fix.needs:
        covered = [v for v in recipe.supported if need.covers(v)]
        assert covered, f"{need.versions} covers no release"
        assert need.reason
        assert need.arch in ("", *fix.arches)
    for arch in fix.arches:
        lower = [
            clause
            for need in fix.needs_of(arch)
            for clause in SpecifierSet(need.versions)
            if clause.operator in {">=", "=="}
        ]
        assert lower, f"nothing says where {fix.id} starts for {arch}"


@pytest.mark.parametrize(("recipe", "fix"), FIXES)
def test_every_fix_has_an_example_that_needs_it(recipe, fix):
    assert fix.examples
    for example in fix.examples:
        assert example.arch in fix.arches
        assert Version(example.version) in recipe.supported
        assert fix.need(Version(example.version), example.arch) is not None


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
    on_disk = make_tree(example.version, {**files, example.path: example.after}, name="done")
    for patched in (pending, on_disk):
        again = fix.look(patched, request)
        assert (again.state, again.edits) == (State.APPLIED, ())
        assert again.reason


@pytest.mark.parametrize(("fix", "example"), EXAMPLES)
def test_an_example_is_code_of_its_language(fix, example):
    if example.path.endswith(".py"):
        check_syntax(example.path, example.before)
        check_syntax(example.path, example.after)
        assert ast.dump(ast.parse(example.before)) != ast.dump(ast.parse(example.after))
    assert example.before is None or example.before.endswith("\n")
    assert example.after.endswith("\n")
