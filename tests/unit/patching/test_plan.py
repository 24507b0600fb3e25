"""Versions select, the code decides; what the user asked for; several fixes over one tree."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkit.apply import (
    apply,
    drafted,
    finish,
    revert,
    revert_libraries,
)
from patchkit.edit.splice import Edit
from patchkit.edit.text import new_file, swap_text
from patchkit.errors import DriftError, ProofError, UsageError
from patchkit.patching.fix import (
    Fix,
    Need,
    Observation,
    Severity,
    State,
    found,
    upstream,
)
from patchkit.patching.plan import make_plan
from patchkit.patching.recipe import load_recipe
from patchkit.patching.workspace import locked_workspace, open_workspace
from patchkit.source.detect import detect
from patchkit.source.tree import Sandboxed
from support import read_files, write_files
from support.wheels import record

PATH = "a.txt"
STOCK, PATCHED, FIXED = "old\n", "new\n", "theirs\n"
NEED = Need(">=0.12,<0.20", "old is wrong", Severity.REQUIRED)


def fix_of(name, before="old\n", after="new\n", *, path=PATH, needs=(NEED,), **fields):
    """A fix that swaps one text for another; ``theirs`` is how upstream solved it."""

    def look(tree, request):
        text = tree.read(path)
        if "theirs" in text:
            return upstream(f"{path}: theirs")
        edits = swap_text(path, text, before, after, note=f"by {name}")
        return found(
            edits, now=f"{path}: has {before!r}", done=f"{path}: has {after!r}"
        )

    texts = {
        "title": "t",
        "symptom": "s",
        "why": f"{name} matters",
        "upstream": "0.20 has theirs",
    }
    return Fix(
        **{"id": name, **texts, "needs": needs, "evidence": (), "look": look, **fields}
    )


def recipe_of(*fixes):
    return replace(load_recipe("vllm"), fixes=fixes)


@pytest.fixture
def plan_of(make_tree, ask):
    """The plan for one small tree: ``plan_of([fix], text, version, **request)``."""

    def plan(fixes, text=STOCK, version="0.19.1", *, kind="sdist", **request):
        tree = make_tree(version, {PATH: text}, kind=kind)
        return make_plan(tree, recipe_of(*fixes), ask(**request))

    return plan


def states(plan):
    return {verdict.fix.id: verdict.state.value for verdict in plan.verdicts}


@pytest.mark.parametrize(
    ("version", "text", "state", "reason"),
    [
        # Known releases: version and code must agree.
        ("0.19.1", STOCK, "apply", "a.txt: has 'old\\n'"),
        ("0.19.1", PATCHED, "applied", "a.txt: has 'new\\n'"),
        (
            "0.19.1",
            FIXED,
            "drifted",
            "0.19.1 is known to need this, but the code says: a.txt: the",
        ),
        ("0.19.1", "neither\n", "drifted", "a.txt:1: 'old' found 0 times"),
        ("0.19.1", "old\nold\n", "drifted", "a.txt:1,2: 'old' found 2 times"),
        (
            "0.20.0",
            STOCK,
            "drifted",
            "0.20.0 is known to be right (0.20 has theirs), but the code",
        ),
        ("0.20.0", FIXED, "upstream", "a.txt: theirs"),
        ("0.20.0", PATCHED, "upstream", "a.txt: has 'new\\n'"),
        ("0.20.0+cpu", STOCK, "drifted", "0.20.0+cpu is known to be right"),
        ("0.12.0", STOCK, "apply", "a.txt: has 'old\\n'"),
        # Before the first need nobody looks at the code.
        ("0.11.2", STOCK, "not-applicable", "not needed in 0.11.2"),
        ("0.11.3", STOCK, "not-applicable", "not needed in 0.11.3"),
        ("0.11.2.dev4+gabc", STOCK, "not-applicable", "not needed in 0.11.2.dev4+gab"),
    ],
)
def test_a_known_release_and_its_code_must_agree(version, text, state, reason, plan_of):
    [verdict] = plan_of([fix_of("a")], text, version).verdicts
    assert verdict.state.value == state
    assert verdict.reason.startswith(reason)
    assert verdict.note == ""
    assert bool(verdict.edits) == (state == "apply")


@pytest.mark.parametrize(
    ("version", "needed", "early"),
    [
        # Between 0.11.2 and 0.12.0, which is the first that needs it.
        ("0.11.3.dev4+gabc1234", True, True),
        ("0.12.0rc1", True, True),
        ("0.12.0.dev3+gabc1234", True, True),
        ("0.12.1.dev3+gabc1234", True, False),
        ("0.19.1.dev3+gabc1234", True, False),
        ("0.20.0rc1", False, False),
        ("0.33.1.dev5+g123abc", False, False),
        ("1.0", False, False),
    ],
)
def test_the_code_alone_decides_for_other_versions(version, needed, early, plan_of):
    expected = {
        STOCK: State.APPLY,
        PATCHED: State.APPLIED if needed else State.UPSTREAM,
        FIXED: State.UPSTREAM,
    }
    for text, state in expected.items():
        [verdict] = plan_of([fix_of("a")], text, version).verdicts
        assert (verdict.state, verdict.severity) == (state, Severity.REQUIRED)
        assert (
            verdict.note == f"{version} is not in the table; decided by the code alone"
        )
    [verdict] = plan_of([fix_of("a")], "neither\n", version).verdicts
    left_out = f"a is left out: {version} is no release, and has no code for it"
    state, note = (State.NOT_APPLICABLE, left_out) if early else (State.DRIFTED, "")
    assert (verdict.state, verdict.note) == (state, note)
    assert verdict.reason.startswith("a.txt:1: 'old' found 0 times, expected 1")
    # Code that is there, but not as any release has it, is drift in every tree.
    [verdict] = plan_of([fix_of("a")], "old\nold\n", version).verdicts
    assert verdict.state is State.DRIFTED


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("0.19.1", "drifted"),
        ("0.34.0", "drifted"),
        ("0.11.3.dev4+gabc1234", "not-applicable"),
        ("0.12.0.dev3+gabc1234", "not-applicable"),
        ("0.33.1.dev5+g123abc", "not-applicable"),
    ],
)
def test_what_a_development_version_does_not_have_is_no_drift(version, state, plan_of):
    absent = fix_of("a", path="b.txt")
    [verdict, other] = plan_of([absent, fix_of("b")], STOCK, version).verdicts
    assert verdict.state.value == state
    assert verdict.reason.startswith("b.txt: not found in ")
    noted = f"a is left out: {version} is no release, and has no code for it"
    assert verdict.note == ("" if state == "drifted" else noted)
    assert other.state is State.APPLY


@pytest.mark.parametrize(
    ("fields", "request_", "reason"),
    [
        (
            {"layer": "build"},
            {"kind": "installed"},
            "an installed package is already compiled",
        ),
        (
            {"needs": (replace(NEED, arch="native"),)},
            {"arch": "family"},
            "needed for --arch native alone",
        ),
        ({"majors": (12,)}, {"target": "thor"}, "thor is not SM12x"),
        ({"majors": (11, 12)}, {"target": "h200"}, "h200 is not SM11x or SM12x"),
    ],
)
def test_a_fix_stays_out_of_what_it_is_not_for(fields, request_, reason, plan_of):
    [verdict] = plan_of([fix_of("a", **fields)], "neither\n", **request_).verdicts
    assert (verdict.state, verdict.reason) == (State.NOT_APPLICABLE, reason)


ONLY_GB10 = (
    Need(">=0.12,<0.16", "both", Severity.REQUIRED),
    Need(">=0.16,<0.20", "one", Severity.REQUIRED, target="gb10"),
)


@pytest.mark.parametrize(
    ("version", "target", "state", "reason"),
    [
        ("0.14.1", "rtx50", "apply", "a.txt: has 'old\\n'"),
        ("0.19.1", "gb10", "apply", "a.txt: has 'old\\n'"),
        ("0.19.1", "rtx50", "not-applicable", "needed for gb10 alone"),
        ("0.20.0", "rtx50", "drifted", "0.20.0 is known to be right"),
    ],
)
def test_a_release_may_need_a_fix_on_one_device_alone(
    version, target, state, reason, plan_of
):
    fix = fix_of("a", needs=ONLY_GB10)
    [verdict] = plan_of([fix], STOCK, version, target=target).verdicts
    assert verdict.state.value == state
    assert verdict.reason.startswith(reason)
    assert ONLY_GB10[1].limits == "gb10"


OPTIONAL = (Need(">=0.12", "faster", Severity.OPTIONAL),)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({}, {"a": "apply", "b": "apply", "c": "off"}),
        ({"also": {"c"}}, {"a": "apply", "b": "apply", "c": "apply"}),
        ({"only": {"b"}}, {"a": "off", "b": "apply", "c": "off"}),
        ({"only": {"c"}}, {"a": "off", "b": "off", "c": "apply"}),
        ({"skip": {"a", "c"}}, {"a": "off", "b": "apply", "c": "off"}),
    ],
)
def test_selection(request_, expected, plan_of):
    fixes = [
        fix_of("a", "one\n", "1\n"),
        fix_of("b", "two\n", "2\n"),
        fix_of("c", "three\n", "3\n", needs=OPTIONAL),
    ]
    plan = plan_of(fixes, "one\ntwo\nthree\n", **request_)
    assert states(plan) == expected
    assert plan.patched.read(PATH) == "".join(
        f"{new if expected[name] == 'apply' else old}\n"
        for name, old, new in (
            ("a", "one", "1"),
            ("b", "two", "2"),
            ("c", "three", "3"),
        )
    )


@pytest.mark.parametrize(
    ("request_", "message", "hint"),
    [
        (
            {"skip": {"marlin_sas"}},
            "no fix is called 'marlin_sas'",
            "did you mean marlin_sass",
        ),
        ({"only": {"?"}}, r"no fix is called '\?'", "patchkit fixes"),
        (
            {"only": {"other"}, "skip": {"other"}},
            "other is asked for and left out at once",
            "",
        ),
    ],
)
def test_an_impossible_selection_is_refused(request_, message, hint, plan_of):
    with pytest.raises(UsageError, match=message) as caught:
        plan_of([fix_of("marlin_sass"), fix_of("other")], **request_)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "request_", "expected"),
    [
        ("base\ntop\n", {}, {"base": "apply", "top": "apply"}),
        ("base\ntop\n", {"skip": {"base"}}, UsageError),
        ("base\ntop\n", {"only": {"top"}}, UsageError),
        ("BASE\ntop\n", {"skip": {"base"}}, {"base": "off", "top": "apply"}),
    ],
)
def test_a_required_fix_is_not_left_out_unnoticed(text, request_, expected, plan_of):
    fixes = [
        fix_of("top", "top\n", "TOP\n", requires=("base",)),
        fix_of("base", "base\n", "BASE\n"),
    ]
    if expected is UsageError:
        with pytest.raises(UsageError, match="top without base") as caught:
            plan_of(fixes, text, **request_)
        assert caught.value.why == "base matters"
        assert "--with base" in caught.value.hint
    else:
        assert states(plan_of(fixes, text, **request_)) == expected


def test_a_later_fix_sees_the_edits_of_the_earlier_ones(make_tree, ask):
    first = fix_of("first", "one\n", "one\nmiddle\n")
    second = fix_of("second", "middle\n", "MIDDLE\n")
    elsewhere = fix_of("elsewhere", "é", "è", path="sub/b.txt")
    tree = make_tree("0.19.1", {PATH: "one\ntwo", "sub/b.txt": "é"})

    plan = make_plan(tree, recipe_of(first, second, elsewhere), ask())

    assert states(plan) == {"first": "apply", "second": "apply", "elsewhere": "apply"}
    assert plan.texts == {
        PATH: ("one\ntwo", "one\nMIDDLE\ntwo"),
        "sub/b.txt": ("é", "è"),
    }
    assert plan.stock.read(PATH) == (tree.root / PATH).read_text() == "one\ntwo"


MARKERS = ("setup.py", "CMakeLists.txt", "cmake/utils.cmake", "vllm/__init__.py")
SDIST = {
    **dict.fromkeys(MARKERS, ""),
    "PKG-INFO": "Name: vllm\nVersion: 0.19.1\n",
    PATH: f"line\n{STOCK}",
}


@pytest.fixture
def sdist(make_tree):
    """A tree that apply recognises, with one line to patch."""
    return make_tree("0.19.1", SDIST).root


def test_a_fix_that_does_not_know_its_own_result_is_refused(sdist, ask):
    """The edits go in, but asked again the fix wants to edit once more."""
    edits = (Edit(PATH, 0, 0, "more\n", "n"),)
    forgetful = replace(
        fix_of("a"), look=lambda tree, request: Observation(State.APPLY, "r", edits)
    )
    before = read_files(sdist)
    with pytest.raises(ProofError, match="a does not recognise its own result"):
        apply(sdist, recipe_of(forgetful), ask())
    assert read_files(sdist) == before


NEW = "vllm/E=8,block_shape=[128,128].json"


def creating(path, text, name="new", **fields):
    """A fix that creates a file."""

    def look(tree, request):
        edits = new_file(path, tree.find(path), text, note=f"by {name}")
        return found(edits, now=f"{path}: is missing", done=f"{path}: is there")

    return replace(fix_of(name), look=look, **fields)


@pytest.mark.parametrize("path", [NEW, PATH])
def test_what_changes_during_the_proof_is_never_overwritten(path, sdist, ask):
    def prove(_case):
        (sdist / path).write_text("mine\n")
        return "somebody was quicker"

    fixes = recipe_of(creating(NEW, "{}\n", prove=prove), fix_of("a"))
    before = read_files(sdist)
    with pytest.raises(DriftError, match="changed while patchkit was working"):
        apply(sdist, fixes, ask())
    assert read_files(sdist) == {**before, path: b"mine\n"}


def test_texts_and_libraries_of_a_package_are_changed_without_each_other(
    make_tree, ask
):
    home, library, recipe = (
        "vllm-0.19.1.dist-info",
        "vllm/_C.so",
        recipe_of(fix_of("a")),
    )
    meta = {
        f"{home}/METADATA": "Name: vllm\nVersion: 0.19.1\n",
        f"{home}/RECORD": "vllm/_C.so,,\n",
    }
    stock = {"vllm/__init__.py": "", PATH: STOCK, library: "stock", **meta}
    site = make_tree("0.19.1", stock, kind="installed").root
    package, before = site / "vllm", read_files(site)

    def applied(text, **request):
        always = Sandboxed.ALWAYS
        with drafted(
            package, recipe, ask(**request), dry_run=False, sandboxed=always
        ) as draft:
            new = draft.workspace.make_folder() / "C"
            new.write_text(text)
            written = finish(draft, {library: new} if text else {}).written

        data = {path: (site / path).read_bytes() for path in (PATH, library)}
        rows = (site / home / "RECORD").read_text().split()
        assert record("", {library: data[library]}).decode().split()[0] in rows
        return written, *(each.decode() for each in data.values())

    assert applied("1") == ((PATH, library), PATCHED, "1")
    assert applied("", skip={"a"}) == ((PATH,), STOCK, "1")
    assert applied("") == ((PATH,), PATCHED, "1")
    assert applied("2") == ((library,), PATCHED, "2")
    with locked_workspace(partial(detect, package, "vllm")) as workspace:
        assert revert_libraries(workspace) == (library,)
    assert applied("3", skip={"a"}) == ((PATH, library), STOCK, "3")
    assert {*revert(package, "vllm")} == {library, f"{home}/RECORD"}
    assert read_files(site) == before


@settings(max_examples=30, deadline=None, database=None)
@given(
    name=st.text(st.sampled_from("aZ09=,[]{}()*?!#~%&;$'._- é𝟚"), max_size=30),
    text=st.text(st.sampled_from("ab{}: \n\f\u2028é𝟚"), max_size=30),
    patched=st.booleans(),
)
def test_creating_and_reverting_leaves_nothing(
    name, text, patched, ask, git, tmp_path_factory
):
    root = write_files(tmp_path_factory.mktemp("tree"), SDIST)
    before, path = read_files(root), f"vllm/a{name}.json"
    recipe = recipe_of(creating(path, text), *([fix_of("a")] if patched else []))

    pending = apply(root, recipe, ask(), dry_run=True).pending
    diff = make_plan(open_workspace(root, "vllm").tree, recipe, ask()).diff()
    assert read_files(root) == before
    outcome = apply(root, recipe, ask())

    created = {path: text.encode()}
    assert set(outcome.written) == set(pending) == ({path, PATH} if patched else {path})
    assert (root / path).read_bytes() == text.encode()
    assert apply(root, recipe, ask()).written == ()
    assert set(revert(root, "vllm")) == set(outcome.written)
    assert read_files(root) == before
    git(root, "apply", stdin=diff)
    assert read_files(root) == {
        **before,
        **created,
        **({PATH: b"line\nnew\n"} if patched else {}),
    }
