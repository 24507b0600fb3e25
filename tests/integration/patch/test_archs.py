"""Arch lists: patchkit's reading of CMake against an independent one, and the golden tables."""

import re
from itertools import cycle, product

import pytest

from patchkit.patching.recipe import load_support
from patchkit.recipes.vllm.archs import evaluate
from patchkit.source.detect import detect
from patchkit.target import Load, best_load, parse_arch, targets
from support.selection import RELEASES, WHOLE, in_turns
from tools.regenerate import plan as proved
from tools.seen import arch_rows, support_of
from tools.tables import ARCHS, DATA, read_rows

CUDA = "13.0"

# Names of tests/data/stock-archs.csv → variable, start of the name and define of patchkit's groups.
# Its figures come from configuring each release with CMake and the scripts of the torch that it
# pins; they were written down per source file, before patchkit could read a CMake file.
GROUPS = {
    "_C base": ("CUDA_ARCHS", r"(?!cumem|moe/)", ""),
    "_moe_C base": ("CUDA_ARCHS", "moe/moe_align_sum_kernels", ""),
    "blockwise_group_sm100": (
        "SCALED_MM_ARCHS",
        "moe/blockwise",
        "ENABLE_CUTLASS_MOE_SM100",
    ),
    "cooperative_topk": ("COOPERATIVE_TOPK_ARCHS", "", ""),
    "cumem": ("CUDA_ARCHS", "cumem_allocator", ""),
    "cutlass_mla(sm100)": ("MLA_ARCHS", "", ""),
    "deepgemm": ("DEEPGEMM_ARCHS", "", ""),
    "dsv3_fused_a_gemm": ("DSV3_FUSED_A_GEMM_ARCHS", "", ""),
    "flashkda": ("FLASH_KDA_ARCHS", "", ""),
    "fp32_router_gemm": ("FP32_ROUTER_GEMM_ARCHS", "", ""),
    "fused_gdn_decode": ("FUSED_GDN_DECODE_ARCHS", "", ""),
    "fused_kda_decode": ("FUSED_KDA_DECODE_ARCHS", "", ""),
    "hadacore": ("HADACORE_ARCHS", "", ""),
    "marlin(all)": ("MARLIN_ARCHS", "gptq_marlin/kernel_", ""),
    "marlin_bf16": ("MARLIN_BF16_ARCHS", "", ""),
    "marlin_fp16": ("MARLIN_ARCHS", r"\w+/sm80_kernel_", ""),
    "marlin_fp8in": ("MARLIN_FP8_ARCHS", "", ""),
    "marlin_moe": ("MARLIN_MOE_ARCHS", "", ""),
    "marlin_moe_fp8in": ("MARLIN_MOE_FP8_ARCHS", "", ""),
    "marlin_moe_ops": ("MARLIN_MOE_OTHER_ARCHS", "", ""),
    "marlin_other": (r"MARLIN(_OTHER)?_ARCHS", r"sparse/|marlin/marlin$", ""),
    "minimax_m3_fused": ("MINIMAX_M3_FUSED_ARCHS", "", ""),
    "moe_data": ("CUTLASS_MOE_DATA_ARCHS", "", ""),
    "moe_wna16.cu": ("CUDA_ARCHS", "moe/moe_wna16", ""),
    "nvfp4_kv_cache_kernels.cu": (
        "FP4_ARCHS",
        r".*nvfp4_kv_cache",
        "ENABLE_NVFP4_SM120",
    ),
    "nvfp4_sm100": (r"FP4(_SM100)?_ARCHS", "fp4/", "ENABLE_NVFP4_SM100"),
    "nvfp4_sm120": (r"FP4(_SM120)?_ARCHS", "fp4/", "ENABLE_NVFP4_SM120"),
    "qutlass": ("QUTLASS_ARCHS", "", ""),
    "router_gemm": ("SM90PLUS_ROUTER_GEMM_ARCHS", "", ""),
    "scaled_mm_c2x": ("SCALED_MM_2X_ARCHS", "", ""),
    "scaled_mm_sm100": ("SCALED_MM_ARCHS", "", "ENABLE_SCALED_MM_SM100"),
    "scaled_mm_sm120": ("SCALED_MM_ARCHS", "", "ENABLE_SCALED_MM_SM120"),
}
ARCH_LISTS = ("12.1a", "12.0", "Auto")
# (releases, arch list, name) → archs that patchkit gives and the table does not have, and why:
# asked for 12.1a, stock's generator writes no FP8-input source files (what marlin_fp8_generator
# mends), and an arch list without a file leaves no mark in a configured build.
WITHOUT_SOURCES = {
    (release, "12.1a", name): {"12.1a"}
    for release in ("0.19.0", "0.19.1")
    for name in ("marlin_fp8in", "marlin_moe_fp8in")
}
# Stock 0.11.1 builds these for SM12x by mistake; sm100_lists ends that for a family build.
SM100_OF_0_11_1 = {
    "cutlass/scaled_mm_c3x_sm100",
    "fp4/nvfp4_quant_kernels",
    "moe/blockwise_scaled_group_mm_sm100",
}
# Only SM100 selects it; up to 0.18 its list does not lead to 12.1a, and nothing makes it.
MLA = ("mla/sm100_cutlass_mla_kernel", "MLA_ARCHS")


@pytest.mark.releases
@pytest.mark.parametrize(
    ("version", "arch_list"),
    [*product(RELEASES, ARCH_LISTS)]
    if WHOLE
    else [*zip(RELEASES, cycle(ARCH_LISTS), strict=False)],
)
def test_stock_archs_equal_those_of_a_real_configure(version, arch_list, release):
    groups = evaluate(
        detect(release(version), "vllm"), targets()["gb10"], arch_list, CUDA
    )
    found = {name: [g for g in groups if _is(g, *GROUPS[name])] for name in GROUPS}
    left_over = [
        g for g in groups if g.archs and not any(g in of for of in found.values())
    ]
    known = {
        row["group"]: {row["archs"]} - {"none"}
        for row in read_rows(DATA / "stock-archs.csv")
        if (row["release"], row["arch_list"]) == (version, arch_list)
    }
    expected = {
        name: known.get(name, set())
        | WITHOUT_SOURCES.get((version, arch_list, name), set())
        for name in GROUPS
    }
    assert known.keys() <= GROUPS.keys()
    assert {name: _archs(of) for name, of in found.items()} == expected
    assert not left_over


def _is(group, variable, name, define):
    defines = [d.removeprefix("-D").removesuffix("=1") for d in group.defines]
    return (
        re.fullmatch(variable, group.variable)
        and re.match(name, group.name)
        and (not define or define in defines)
    )


def _archs(groups):
    return {";".join(group.archs) for group in groups if group.archs}


@pytest.mark.releases
@in_turns
def test_archs_and_needs_are_those_of_the_golden_tables(version, arch, release):
    rows = [r for r in read_rows(ARCHS) if (r["release"], r["arch"]) == (version, arch)]
    plan = proved(release(version), arch)
    assert arch_rows(plan) == rows
    needed = {fix: modes[arch][version] for fix, modes in load_support("vllm").items()}
    assert {v.fix.id: support_of(v).value for v in plan.verdicts} == needed


@pytest.fixture(scope="module")
def rows():
    """Rows of one mode, with their lists split."""
    lists = ("stock", "patched")
    split = [
        {
            **row,
            **{name: [arch for arch in row[name].split(";") if arch] for name in lists},
        }
        for row in read_rows(ARCHS)
    ]
    return lambda mode: [row for row in split if row["arch"] == mode]


def test_native_gives_12_1a_wherever_stock_builds_for_sm12x(rows):
    wrong = [
        row
        for row in rows("native")
        if any(map(_is_sm12x, row["stock"]))
        and not _is_sm100(row)
        and row["patched"]
        != ["12.1a", *(_alone(a) for a in row["stock"] if not _is_sm12x(a))]
    ]
    assert not wrong


def test_everything_of_a_family_build_loads_on_12_1(rows):
    built = [row for row in rows("family") if row["patched"]]
    assert built
    assert not [
        r for r in built if best_load(tuple(r["patched"]), (12, 1)) is Load.NONE
    ]


def _alone(arch):
    """Give an entry as ptx_only leaves it: what is not for SM12x is PTX alone."""
    return arch if _is_sm12x(arch) else arch.replace("+PTX", "-virtual")


def _is_sm12x(arch):
    return parse_arch(arch).major == 12


def _is_sm100(row):
    # The SM120 group of NVFP4 starts with the same source file, and stays.
    mistaken = row["release"] == "0.11.1" and row["group"] in SM100_OF_0_11_1
    return not row["patched"] and (mistaken or row["variable"] == MLA[1])
