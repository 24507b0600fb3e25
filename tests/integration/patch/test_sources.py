"""CUDA sources of each library, counted before anything is compiled."""

from __future__ import annotations

from collections import Counter
from itertools import groupby, product

import pytest

from e2e.proofs.build_proof import GOLDEN
from e2e.proofs.build_proof import RELEASES as RECORDED
from patchkit.apply import plan_for
from patchkit.errors import UsageError
from patchkit.patching.workspace import open_workspace
from patchkit.recipes.vllm.build import by_option
from patchkit.recipes.vllm.leave_out import leave_out
from patchkit.recipes.vllm.sources import (
    CudaSource,
    check_in_vain,
    codes_of,
    counts,
    default_codes,
    planned_sources,
)
from patchkit.target import targets
from support.selection import MODES, RELEASES, WHOLE
from tools.seen import source_rows, unproved
from tools.tables import SOURCES, read_rows

GB10 = targets()["gb10"]


@pytest.mark.releases
@pytest.mark.parametrize(
    ("version", "arch"),
    [*product(RELEASES, MODES)]
    if WHOLE
    else [("0.11.1", "family"), ("0.19.1", "native"), (RELEASES[-1], "native")],
)
def test_sources_are_those_of_the_golden_table(version, arch, release):
    golden = [r for r in read_rows(SOURCES) if (r["release"], r["arch"]) == (version, arch)]
    assert source_rows(unproved(release(version), arch)) == golden


def test_the_golden_table_covers_every_supported_release(recipe):
    keys = [(row["release"], row["arch"]) for row in read_rows(SOURCES)]
    supported = [str(version) for version in recipe.supported]
    assert [key for key, _ in groupby(keys)] == [*product(supported, MODES)]


def test_nothing_that_is_built_for_a_gb10_is_dead_weight():
    patched = [row for row in read_rows(SOURCES) if row["tree"] == "patched"]
    assert {row["dead"] for row in patched} == {"0", ""}
    assert {row["library"] for row in patched if not row["sources"]} == {"_vllm_fa2_C"}


@pytest.mark.releases
@pytest.mark.parametrize("version", RECORDED)
def test_the_plan_has_as_many_sources_as_cmake_told_nvcc_of(version, release):
    """Beside the compile_commands.json of real builds, which build_proof.py recorded."""
    golden: Counter[str] = Counter()
    for row in read_rows(GOLDEN):
        if row["release"] == version:
            golden[row["library"]] += int(row["sources"])
    left = by_option(RECORDED[version]["without"])
    tree = leave_out(unproved(release(version), "native").patched, left)
    planned = planned_sources(tree, GB10, GB10.native, GB10.cuda)
    assert Counter(each.library for each in planned) == golden


@pytest.mark.releases
def test_a_library_that_is_compiled_in_vain_is_found_before(release, recipe, ask):
    request = ask(skip={"fa3_hopper"})
    with_it = plan_for(open_workspace(release("0.25.1")), recipe, request).patched
    with pytest.raises(UsageError) as failed:
        check_in_vain(with_it, GB10, request.arch_list)
    assert failed.value.what == (
        "_vllm_fa3_C would be compiled in vain: none of its 192 CUDA sources has code for "
        "NVIDIA DGX Spark (GB10)"
    )
    assert "--without flash-attn" in failed.value.hint
    without = leave_out(with_it, by_option(["flash-attn"]))
    check_in_vain(without, GB10, request.arch_list)


def test_how_a_source_is_counted():
    for codes, counted in (
        (["sm_121a"], "exact"),
        (["sm_120f"], "family"),
        (["compute_90"], "ptx"),
        (["sm_89", "compute_89"], "ptx foreign"),
        (["sm_121a", "sm_90a"], "exact foreign"),
        (["sm_90a"], "dead foreign"),
        (["compute_90a"], "dead"),
        ([], "dead foreign"),  # nvcc's own: its PTX would load, and nobody meant it to
    ):
        (count,) = counts([CudaSource("a.cu", "_C", codes_of(codes) or default_codes())], GB10)
        kinds = ("exact", "family", "ptx", "dead", "foreign")
        assert {kind for kind in kinds if getattr(count, kind)} == set(counted.split())
        assert count.in_vain == ("dead" in counted)
