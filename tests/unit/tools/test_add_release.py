"""A release is added to the tables whole or not at all, and what a person decides is asked for.

The facts of NCCL's releases are such tables, too.
"""

import json
import sys

import pytest

from patchkit.errors import DriftError
from patchkit.patching.recipe import load_recipe
from patchkit.process import attempt
from patchkit.recipes.vllm.external import External
from patchkit.records import RECIPES
from patchkit.source.releases import load_facts
from patchkit.target import parse_arch
from tools.entries import with_nccl_release, with_needs, with_pin, without
from tools.nccl_names import with_names
from tools.seen import unproved
from tools.stage import ROOT, differences, staged
from tools.tables import SUPPORT, updated

BUILD = (RECIPES / "vllm" / "build.toml").read_text(encoding="utf-8")
NCCL = (RECIPES / "nccl" / "recipe.toml").read_text(encoding="utf-8")
RELEASES = list(map(str, load_recipe("vllm").supported))
FACTS = load_facts("nccl")
CUTLASS = External(
    name="cutlass",
    variable="X",
    url="https://example.org/x",
    pin="0123456789abcdef0123456789abcdef01234567",
    submodules=None,
    path="cmake/x.cmake",
    line=7,
)


def test_what_tables_say_is_read_back_and_written_as_it_was():
    recipe = load_recipe("vllm")
    support = json.loads(SUPPORT.read_text(encoding="utf-8"))
    texts = updated([], RELEASES, [fix.id for fix in recipe.fixes], support)
    assert len(texts) == 9
    assert [path.name for path, text in texts.items() if path.read_text() != text] == []


def test_what_is_entered_can_be_taken_out():
    for before, after in (
        (
            BUILD,
            with_needs(BUILD, "9.9.9", {"torch": "9.1", "patch": True, "standard": 23}),
        ),
        (BUILD, with_pin(BUILD, "9.9.9", CUTLASS)),
        (
            NCCL,
            with_nccl_release(
                NCCL, {"version": "9.9.9", "tag": "v9.9.9-1", "archs": ["8.0"]}
            ),
        ),
        (
            NCCL,
            with_nccl_release(
                NCCL, {"version": "2.29.5", "tag": "v2.29.5-1", "read": False}
            ),
        ),
    ):
        version = "9.9.9" if "9.9.9" in after else "2.29.5"
        added = set(after.splitlines()) - set(before.splitlines())
        assert any(version in line for line in added)
        assert without(after, version) == before


def test_rows_of_nccls_variables_go_on_while_its_sources_read_them(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.cc").write_text(
        'NCCL_PARAM(A, "STAYS", 1); NCCL_PARAM(B, "OTHER", 3);'
    )
    (tmp_path / "src/b.h").write_text('getenv("NCCL_NEW")')
    rows = "NCCL_GONE\t1.0\t1.1\t\nNCCL_OTHER\t1.0\t1.1\t2\nNCCL_STAYS\t1.0\t1.1\t1\n"
    text = with_names(f"# what\n# sources at 1.0, 1.1.\n{rows}", "1.2", tmp_path)
    assert text.splitlines() == [
        "# what",
        "# sources at 1.0, 1.1, 1.2.",
        "NCCL_GONE\t1.0\t1.1\t",
        "NCCL_NEW\t1.2\t1.2\t",
        "NCCL_OTHER\t1.0\t1.1\t2",
        "NCCL_OTHER\t1.2\t1.2\t3",
        "NCCL_STAYS\t1.0\t1.2\t1",
    ]


def test_fixes_that_do_not_fit_are_named_with_their_files(make_tree):
    about = f"Metadata-Version: 2.1\nName: vllm\nVersion: {RELEASES[-1]}\n"
    empty = ("setup.py", "CMakeLists.txt", "cmake/utils.cmake", "vllm/__init__.py")
    tree = make_tree(RELEASES[-1], {**dict.fromkeys(empty, ""), "PKG-INFO": about})
    with pytest.raises(
        DriftError, match=f"^vLLM {RELEASES[-1]}, native: fixes do not fit"
    ) as error:
        unproved(tree.root, "native")
    places = error.value.what.splitlines()[1:]
    named = [
        place.strip().partition(":")[0] for place in places if "  recipes/" in place
    ]
    assert len(named) > 5
    assert all((ROOT / path).is_file() for path in named)


@pytest.mark.skipif(
    not (ROOT / "recipes").is_dir(),
    reason="a source distribution has its recipes in the package",
)
@pytest.mark.parametrize(
    "release", [["0.99.0"], ["nccl", "99.0.0"]], ids=["vLLM", "NCCL"]
)
def test_without_the_index_nothing_is_entered(release, tmp_path):
    with staged() as stage:
        before = differences(ROOT, stage)
        done = attempt(
            *(sys.executable, "-m", "tools.add_release", *release),
            cwd=stage,
            env={
                "PATH": "/usr/bin:/bin",
                "HOME": str(tmp_path),
                "PYTHONPATH": f"{stage}:{stage / 'tests'}",
                "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
            },
        )
        assert before == differences(ROOT, stage) == []
    assert "is not entered, and no file was changed" in done.output
    assert "error: the connection to 127.0.0.1:9 failed" in done.errors


def test_the_table_is_complete_and_consistent():
    for release in FACTS.releases:
        assert release.tag == f"v{release.version}-1"
        assert len(release.sha256) in (0, 64)
        assert len(release.commit) in (0, 40)
        assert bool(release.sha256 or release.commit) == bool(release.figures)
        assert all(parse_arch(arch) for arch in release.archs)
    versions = [release.version for release in FACTS.releases]
    assert versions == sorted(set(versions))
    assert {FACTS.default, *(pin.version for pin in FACTS.torch.values())} <= set(
        versions
    )
    assert FACTS.known(FACTS.default).commit
    assert all(
        any(bug.covers(version) for version in versions)
        for bug in load_recipe("nccl").facts.bugs
    )
    taken = {bug.take: bug for bug in load_recipe("nccl").facts.bugs if bug.take}
    assert taken.keys() <= set(versions)
    assert not any(bug.covers(version) for version, bug in taken.items())
    digests = [release.sha256 for release in FACTS.releases if release.sha256]
    assert len(set(digests)) == len(digests)
    assert [str(v) for v in load_recipe("nccl").supported][:2] == ["2.26.2", "2.26.3"]
