"""The tuned MoE configs: every row fits the device, and each file goes where it belongs or not."""

import json
import re
import tomllib

import pytest

from patchkit.errors import DriftError, ProofError
from patchkit.patching.fix import Case
from patchkit.patching.recipe import load_recipe

HOME = load_recipe("vllm").home / "moe_configs"
FILES = sorted(HOME.glob("*.json"))
INDEX = tomllib.loads((HOME / "index.toml").read_text())
FIX = load_recipe("vllm").fix("moe_configs")
FOLDER = "vllm/model_executor/layers/fused_moe/configs"
LOOKUP = "vllm/model_executor/layers/fused_moe/fused_moe.py"
BLOCK = "E=256,N=512,device_name=NVIDIA_GB10,dtype=fp8_w8a8,block_shape=[128,128].json"

# How a release looks a config up, in short.
SOURCE = """
import json


def get_config_file_name(E, N, dtype, block_shape=None):
    device_name = current_platform.get_device_name().replace(" ", "_")
    dtype_selector = f",dtype={dtype}" if dtype else ""
    block_shape_selector = ""
    if block_shape:
        block_shape_selector = f",block_shape={block_shape}".replace(" ", "")
    return f"E={E},N={N},device_name={device_name}{dtype_selector}{block_shape_selector}.json"


@functools.lru_cache
def get_moe_configs(E, N, dtype, block_n=None, block_k=None):
    block_shape = [block_n, block_k] if block_n and block_k else None
    name = get_config_file_name(E, N, dtype, block_shape)
    place = os.path.join(os.path.dirname(os.path.realpath(__file__)), "configs", name)
    if os.path.exists(place):
        with open(place) as file:
            tuned_config = json.load(file)
            tuned_config.pop("triton_version", None)
            return {int(key): value for key, value in tuned_config.items()}
    return None
"""
SETUP = 'package_data = ["model_executor/layers/fused_moe/configs/*.json"]\n'


@pytest.fixture
def tree_of(make_tree):
    """A tree with a lookup, and what lies in its folder of configs."""

    def make(version="0.25.1", configs=(), source=SOURCE, setup=SETUP):
        there = {f"{FOLDER}/{name}": text for name, text in dict(configs).items()}
        return make_tree(version, {LOOKUP: source, "setup.py": setup, **there})

    return make


def patched(tree, ask):
    edits = FIX.look(tree, ask()).edits
    return tree.with_texts({edit.path: edit.replacement for edit in edits})


def case(stock, patched, ask):
    return Case(stock=stock, patched=patched, request=ask(), active=frozenset())


def test_without_tolerance_for_it_triton_version_is_left_off(tree_of, ask):
    source = re.sub(r".*triton_version.*\n", "", SOURCE)
    tree = tree_of(source=source)
    texts = {
        edit.path: json.loads(edit.replacement) for edit in FIX.look(tree, ask()).edits
    }
    assert any("triton_version" in place.read_text() for place in FILES)
    for path, table in texts.items():
        shipped = json.loads((HOME / path.rpartition("/")[2]).read_text())
        shipped.pop("triton_version", None)
        assert table == shipped
    assert FIX.prove(case(tree, patched(tree, ask), ask))


def test_files_that_upstream_names_otherwise_are_drift(tree_of, ask):
    with pytest.raises(DriftError, match=rf"^{LOOKUP}: .* gives other names"):
        FIX.look(tree_of(source=SOURCE.replace("E={E}", "experts={E}")), ask())


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (
            {"source": SOURCE.replace('"configs", name', '"tuned", name')},
            "gives None, not",
        ),
        (
            {"source": SOURCE.replace("int(key)", "key")},
            r"gives \[\['1', .* not the rows",
        ),
        (
            {
                "source": SOURCE.replace(
                    "device_name = current", 'device_name = "" and current'
                )
            },
            "gives None, not",
        ),
        ({"setup": ""}, r"E=256,.*: setup\.py does not package it"),
    ],
)
def test_files_that_a_release_would_not_find_are_not_installed(
    alter, message, tree_of, ask
):
    tree = tree_of(**alter)
    with pytest.raises(ProofError, match=message):
        FIX.prove(case(tree, patched(tree, ask), ask))


@pytest.mark.parametrize("device", INDEX["others"])
def test_another_device_must_not_notice(device, tree_of, ask):
    tree = tree_of()
    name = BLOCK.replace("NVIDIA_GB10", device.replace(" ", "_"))
    result = patched(tree, ask).with_texts({f"{FOLDER}/{name}": '{"1": {}}\n'})
    with pytest.raises(ProofError, match=f"{device} gets another config"):
        FIX.prove(case(tree, result, ask))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_rows_fit_the_device_and_prefill_has_one(file):
    """Tiles fit into shared memory. The nearest row is taken, so prefill needs a large one."""
    # Bytes per element of a tile; a name without a dtype is bf16's.
    width = 1 if "dtype=fp8_w8a8" in file.name else 2
    table = json.loads(file.read_text())
    rows = {int(size): row for size, row in table.items() if size.isdecimal()}
    for row in rows.values():
        tiles = (row["BLOCK_SIZE_M"] + row["BLOCK_SIZE_N"]) * row["BLOCK_SIZE_K"]
        needed = (row["num_stages"] - 1) * tiles * width
        assert needed <= INDEX["shared_memory"]
    assert max(rows) >= 256
