"""Where rules lead quantized layers on a GB10: each release's own routing, run with what is set."""

from functools import partial

import pytest

from patchkit.patching.workspace import open_workspace
from patchkit.proof.upstream_code import Anything
from patchkit.recipes.vllm import decisions
from patchkit.recipes.vllm.decisions import fp8_linear
from patchkit.recipes.vllm.routing import Capability, outcome
from patchkit.runtime.rules.presets import load_flag_rules
from patchkit.runtime.rules.releases import within
from patchkit.runtime.rules.rule import load_variable_rules, select_entries
from support.fp8_moe import fp8_moe

pytestmark = [
    pytest.mark.releases,
    pytest.mark.usefixtures("run_here"),
    pytest.mark.filterwarnings(
        "ignore:.*VLLM_:FutureWarning"
    ),  # the end of some is announced
]
GB10 = Capability(12, 1)
BACKENDS = {"--moe-backend": "moe_backend", "--linear-backend": "linear_backend"}
FP8_MARLIN = "vllm/model_executor/kernels/linear/scaled_mm/marlin.py"  # from 0.19 on


def fp8_checkpoint(code, scales):
    """Return what a linear layer of an FP8 checkpoint takes: to 0.18 its method may say Marlin."""
    path = "vllm/model_executor/layers/quantization/fp8.py"
    if code.has(FP8_MARLIN, "MarlinFP8ScaledMMLinearKernel"):
        return fp8_linear(code, scales)
    for kernels in ("Fp8LinearOp", "init_fp8_linear_kernel"):
        code.put(path, kernels, Anything(kernels))
    method = code.get(path, "Fp8LinearMethod")(
        decisions.Off(activation_scheme="static", weight_block_size=None)
    )
    return "marlin" if method.use_marlin else fp8_linear(code, scales)


LAYERS = {
    "FP8 linear per tensor": partial(fp8_checkpoint, scales="tensor"),
    "FP8 linear per token": partial(fp8_checkpoint, scales="token"),
    "FP8 linear per block": partial(fp8_checkpoint, scales="block"),
    "FP8 MoE per tensor": partial(fp8_moe, scales="tensor"),
    "FP8 MoE per token": partial(fp8_moe, scales="token", compressed_tensors=True),
    "FP8 MoE per block": partial(fp8_moe, scales="block"),
    "NVFP4 linear": decisions.nvfp4_linear,
    "NVFP4 MoE": decisions.nvfp4_moe,
}
KERNELS = ("Marlin", "Triton", "torch", "DeepGEMM", "FlashInfer", "CUTLASS")


@pytest.fixture(scope="module")
def leads(release, version):
    """Ask where every layer goes: ``leads({"VLLM_NAME": "1"}, moe_backend="marlin")``."""
    tree = open_workspace(release(version), "vllm").tree

    def ask(environ, **flags):
        device = partial(decisions.on_device, environ=environ, **flags)
        found = {}
        for layer, route in LAYERS.items():
            got = str(
                outcome(lambda *asked, way=route: way(device(*asked)), tree, GB10)
            )
            plain = got.lower().replace("_", "")
            found[layer] = next(
                (name for name in KERNELS if name.lower() in plain), got
            )
        return found

    return ask


@pytest.fixture(scope="module")
def stock(leads):
    return leads({})


def expected(stock, version, entries):
    """Return where layers go by rules: the last one decides, and what none names stays."""
    found = dict(stock)
    for entry in entries:
        for layers, entries_of in entry.routes.items():
            for kernels, _, bounds in (each.partition(" ") for each in entries_of):
                if within(version, bounds):
                    found |= {
                        layer: kernels for layer in LAYERS if layer.startswith(layers)
                    }
    return found


@pytest.mark.parametrize("quantization", ["fp8", "nvfp4"])
def test_variables_lead_where_their_rules_say(quantization, leads, stock, version):
    situation = {
        "target": "gb10",
        "quantization": quantization,
        "moe": "unknown",
        "vllm": version,
    }
    rules = select_entries(load_variable_rules().rules, situation)
    default = [rule for rule in rules if rule.default and rule.routes]
    for more in ([], *([rule] for rule in rules if not rule.default and rule.routes)):
        on = [rule for rule in rules if rule in default or rule in more]
        environ = {name: value for rule in on for name, value in rule.set.items()}
        assert leads(environ) == expected(stock, version, on), environ


def test_flags_lead_where_their_rules_say(leads, stock, version):
    for rule in load_flag_rules().rules:
        if rule.routes and within(version, str(rule.when["vllm"])):
            got = leads({}, **{BACKENDS[rule.flag]: rule.value})
            # A flag is for all layers of a model; FP8 layers are none of an NVFP4 model's.
            ours = {layer: got[layer] for layer in LAYERS if layer.startswith("NVFP4")}
            assert ours == {
                each: expected(stock, version, [rule])[each] for each in ours
            }, rule.id


def test_what_is_advised_against_leads_where_it_is_said_to(leads, stock, version):
    for avoid in load_variable_rules().avoids:
        if avoid.routes and within(version, str(avoid.when["vllm"])):
            got = leads(dict.fromkeys(avoid.variables, avoid.values))
            assert got == expected(stock, version, [avoid]), avoid.id
