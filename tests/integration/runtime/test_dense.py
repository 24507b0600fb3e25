"""8-bit dense layers beside the releases: their own ``resolve_quant_method``, executed."""

import ast
import json
import re
from types import SimpleNamespace

import pytest

from patchkit.patching.workspace import open_workspace
from patchkit.proof.upstream_code import Code
from patchkit.runtime.rules.presets import load_flag_rules
from patchkit.runtime.serve.dense_layers import find_dense_layers
from support.hub import checkpoint

pytestmark = [pytest.mark.releases, pytest.mark.usefixtures("run_here")]
# All that compose it with a checkpoint's own.
RELEASES = (
    *(pytest.param(f"0.{n}.0", marks=pytest.mark.e2e) for n in (30, 31, 32)),
    "0.33.0",
)
LAYERS = "vllm/model_executor/layers/quantization"
FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
}
TYPES = {"NVFP4": ("U8", 1), "FP8": ("F8_E4M3", 1), "BF16": ("BF16", 2)}
# The classes by which the code tells layers and methods apart.
Linear, Experts, Plain, Own, Online = (type(name, (), {}) for name in "LEPOQ")
Mxfp8 = type("Mxfp8", (Online,), {})


@pytest.fixture(scope="module", params=RELEASES)
def tree(request, release):
    return open_workspace(release(request.param), "vllm").tree


def attention(dtype, layer=0, names="qkvo"):
    return {f"model.layers.{layer}.self_attn.{name}_proj": dtype for name in names}


def within(parent, *names):
    return {f"model.layers.{parent}.{name}": "BF16" for name in names}


# What must stay as it is, whatever the case: and a drafter's experts, which are layer 2.
REST = dict.fromkeys(
    ("lm_head", "model.embed_tokens", "mtp.layers.0.self_attn.o_proj"), "BF16"
)
REST |= {
    "visual.layers.0.self_attn.o_proj": "BF16",
    **within("0.mlp", "gate", "router"),
}
REST |= {
    "model.layers.0.mlp.experts.0.up_proj": "NVFP4",
    **within("2.mlp.experts.0", "up_proj"),
}
MOE = "Qwen3MoeForCausalLM"
FIRST = ("0.self_attn.qkv_proj", "0.self_attn.o_proj")
MLA = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj")
GDN = within(
    "1.linear_attn", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"
)
SHARED = within("1.mlp.shared_expert", "gate_proj", "up_proj", "down_proj")
OF_MLA = ("fused_qkv_a_proj", "q_b_proj", "o_proj")
OF_GDN = ("linear_attn.in_proj_qkvz", "linear_attn.out_proj")
OF_SHARED = ("mlp.shared_expert.gate_up_proj", "mlp.shared_expert.down_proj")
CASES = {
    "gpt-oss": (
        "GptOssForCausalLM",
        attention("BF16"),
        ("0.attn.qkv_proj", "0.attn.o_proj"),
    ),
    "NVFP4 experts": ("MiniMaxM2ForCausalLM", attention("BF16"), FIRST),
    "FP8 attention": (MOE, attention("FP8"), ()),
    "another layer": (MOE, attention("BF16") | attention("NVFP4", 1), FIRST),
    "a part": (
        MOE,
        attention("BF16", names="qvo") | attention("FP8", names="k"),
        FIRST[1:],
    ),
    "MLA": (
        "DeepseekV3ForCausalLM",
        within("0.self_attn", *MLA),
        [f"0.self_attn.{name}" for name in OF_MLA],
    ),
    "GDN": (
        "Qwen3_5MoeForConditionalGeneration",
        attention("BF16") | GDN | SHARED,
        [*FIRST, *(f"1.{name}" for name in (*OF_GDN, *OF_SHARED))],
    ),
    "plain experts": (
        MOE,
        attention("BF16") | within("0.mlp.experts.0", "up_proj"),
        (),
    ),
    "no row": ("LlamaForCausalLM", attention("BF16"), ()),
}


def weights(folder, architecture, tensors):
    """Return what a header alone says, each weight of 256 by 256."""
    header, end = {}, 0
    for name, said in tensors.items():
        dtype, width = TYPES[said]
        begin, end = end, end + width * 256 * 256
        shape = {"dtype": dtype, "shape": [256, 256], "data_offsets": [begin, end]}
        header[f"{name}.weight"] = shape
    config = {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}
    return checkpoint(folder, header, {"architectures": [architecture], **config})


def vllm_layers(tensors, *, gpt_oss):
    """Return each layer as vLLM names it, fused, and whether the checkpoint has it quantised."""
    into = {part: whole for whole, parts in FUSED.items() for part in parts}
    layers = {}
    for name in tensors.keys() - {
        "lm_head",
        "model.embed_tokens",
    }:  # which it never asks about
        layer = re.sub(r"experts\.\d+\.\w+$", "experts", name)
        layer = re.sub(r"\w+$", lambda last: into.get(last[0], last[0]), layer)
        layer = layer.replace("self_attn", "attn") if gpt_oss else layer
        layers[layer] = layers.get(layer, False) or tensors[name] != "BF16"
    return layers


@pytest.fixture(scope="module")
def methods(tree):
    """What the release gives to layers: ``methods(setting, layers)`` → name → class."""
    # Of keys and methods the names alone matter, and that the table has them together.
    assert "kMxfp8Dynamic: Mxfp8OnlineLinearMethod" in tree.read(
        f"{LAYERS}/online/base.py"
    )
    mxfp8 = SimpleNamespace(
        linear=SimpleNamespace(weight="mxfp8", activation=None), moe=None
    )
    source = SimpleNamespace(targets=SimpleNamespace(value="targets"))
    stand_ins = {"re": re, "kInt4Static32": None, "OnlineQuantizationSource": source}
    stand_ins |= {"_ONLINE_SHORTHANDS": {"mxfp8": mxfp8}, "_ONLINE_MOE_METHODS": {}}
    stand_ins |= {
        "LinearBase": Linear,
        "RoutedExperts": Experts,
        "UnquantizedLinearMethod": Plain,
    }
    stand_ins |= {
        "UnquantizedFusedMoEMethod": type("M", (), {}),
        "OnlineLinearBase": Online,
    }
    stand_ins |= {
        "OnlineMoEMethodBase": Online,
        "_ONLINE_LINEAR_METHODS": {"mxfp8": Mxfp8},
    }
    code = Code(tree, stand_ins)
    resolve = code.get(f"{LAYERS}/base_config.py", "resolve_quant_method")
    online_config = code.get(f"{LAYERS}/online/base.py", "OnlineQuantizationConfig")

    def ask(setting, layers):
        args = SimpleNamespace(linear=None, moe=None, ignore=[], **json.loads(setting))
        found = {}
        for name, quantised in layers.items():
            config = SimpleNamespace(
                online_quantization_config=online_config(args),
                packed_modules_mapping=FUSED,
                get_quant_method=lambda *_, its=(Own if quantised else Plain): its(),
            )
            layer = Experts() if name.endswith("experts") else Linear()
            found[name] = type(resolve(config, layer, name))
        return found

    return ask


@pytest.mark.parametrize("case", CASES)
def test_layers_get_what_is_said(methods, case, tmp_path):
    architecture, own, expected = CASES[case]
    tensors = REST | own
    found = weights(tmp_path, architecture, tensors)
    dense = find_dense_layers(found, 1)
    assert (dense is None) == (not expected)
    if dense:
        layers = vllm_layers(tensors, gpt_oss=case == "gpt-oss")
        given = methods(dense.setting, layers)
        chosen = {name for name, method in given.items() if method is Mxfp8}
        assert chosen == {f"model.layers.{name}" for name in expected}
        assert all(
            given[name] is Own for name, quantised in layers.items() if quantised
        )
        parts = sum(len(FUSED.get(name.rpartition(".")[2], "1")) for name in chosen)
        assert dense.saved == parts * 256 * 256 * (2 - 1 - 1 / 32)
        assert (
            find_dense_layers(found, 4) is None
        )  # a quarter of a side is too small for the kernel


def test_layers_of_the_table_get_the_quantisation_in_the_code(tree):
    for row in load_flag_rules().dense:
        given = set()
        texts = [
            tree.read(file) for file in row.files if tree.exists(file)
        ]  # 0.31 moved some
        for call in (node for text in texts for node in ast.walk(ast.parse(text))):
            words = (
                {w.arg: w.value for w in call.keywords}
                if isinstance(call, ast.Call)
                else {}
            )
            config = words.get("quant_config", words.get("vllm_config"))
            if (
                config is not None
                and ast.unparse(config) != "None"
                and "prefix" in words
            ):
                given |= set(re.findall(r"\.(\w+)'$", ast.unparse(words["prefix"])))
        names = {name for layer in row.layers for name in layer.split(".")}
        assert names <= given, (row.files, names - given)
