"""Ask a vLLM release's own code which kernels it chooses for a quantised layer.

Stand-ins replace only what is outside the tree: the answers of compiled operators, the checks which
libraries are installed, and the configuration, which has every optional feature off.
"""

import inspect
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from patchkit.errors import ProofError
from patchkit.frozen import Values
from patchkit.proof.upstream_code import Anything, Code
from patchkit.source.tree import SourceTree

_FUSED_MOE = "vllm/model_executor/layers/fused_moe"
_QUANTIZATION = "vllm/model_executor/layers/quantization"
_ACTIVATION = f"{_FUSED_MOE}/activation.py"
_FP8 = f"{_QUANTIZATION}/utils/fp8_utils.py"
_W8A8 = f"{_QUANTIZATION}/utils/w8a8_utils.py"
_NVFP4 = f"{_QUANTIZATION}/utils/nvfp4_utils.py"
_NVFP4_SUPPORT = f"{_QUANTIZATION}/utils/nvfp4_moe_support.py"
_MODELOPT = f"{_QUANTIZATION}/modelopt.py"
_COMPRESSED = f"{_QUANTIZATION}/compressed_tensors/compressed_tensors.py"
_FP8_INIT = "init_fp8_linear_kernel"
_NVFP4_INIT = "init_nvfp4_linear_kernel"
_CHOOSE = "choose_scaled_mm_linear_kernel"
KEYS = f"{_QUANTIZATION}/utils/quant_utils.py"
# The module that chooses the kernels of linear layers: from vLLM 0.17 on, and in 0.16.
REGISTRIES = (
    "vllm/model_executor/kernels/linear/__init__.py",
    f"{_QUANTIZATION}/kernels/scaled_mm/__init__.py",
)
NVFP4_MOE = f"{_FUSED_MOE}/oracle/nvfp4.py"

_TABLES = tomllib.loads(
    Path(__file__).with_name("stand_ins.toml").read_text(encoding="utf-8")
)
SCALES: dict[str, list[str]] = _TABLES["scales"]
_NAMES = _TABLES["names"]
_COMPILED = {
    name: range(*bounds).__contains__ for name, bounds in _TABLES["compiled"].items()
}


class Off:
    """A configuration object with the given attributes; every other attribute is False."""

    def __init__(self, **given: object) -> None:
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> bool:
        if name.startswith("__"):
            raise AttributeError(name)
        return False


class Settings:
    """The module ``vllm.envs`` of a release, with ``environ`` as the user's environment."""

    def __init__(self, code: Code, environ: Values) -> None:
        self._code = code
        self._environ = environ

    def is_set(self, name: str) -> bool:
        return name in self._environ

    def __getattr__(self, name: str) -> object:
        variables = self._code.get("vllm/envs.py", "environment_variables")
        if name not in variables:
            raise AttributeError(name)
        return variables[name]()


def on_device(
    tree: SourceTree,
    capability: tuple[int, int],
    environ: Values | None = None,
    *,
    linear_backend: str = "auto",
    moe_backend: str = "auto",
    names: Mapping[str, object] | None = None,
) -> Code:
    """Return the code of a tree as it runs on a CUDA device of ``capability``.

    The platform class and ``vllm/envs.py`` are the release's own. ``environ`` are the user's
    variables, ``linear_backend`` and ``moe_backend`` the user's flags. ``names`` are further
    stand-ins: name → the object that replaces what the code imports under this name.
    """
    variables = dict(environ or {})
    kernels = Off(
        linear_backend=linear_backend,
        moe_backend=moe_backend,
        linear_backend_per_quant=None,
    )

    model = Off(hf_text_config=Off(model_type="qwen3_moe"))
    configuration = Off(kernel_config=kernels, model_config=model)

    stand_ins: dict[str, object] = {
        **dict.fromkeys(_NAMES["installed"], lambda *_args, **_named: True),
        **dict.fromkeys(_NAMES["missing"], lambda *_args, **_named: False),
        "ops": SimpleNamespace(**_COMPILED),
        "cutlass_scaled_mm_supports_fp4": _COMPILED["cutlass_scaled_mm_supports_fp4"],
        "logger": Anything("logger"),
        "init_logger": Anything("init_logger"),
        "os": SimpleNamespace(environ=variables, getenv=variables.get, path=os.path),
        "get_current_vllm_config": lambda: configuration,
        "get_current_vllm_config_or_none": lambda: configuration,
        **(names or {}),
    }

    code = Code(tree, stand_ins)
    stand_ins["envs"] = Settings(code, variables)
    stand_ins["current_platform"] = _make_platform(code, capability)
    return code


def _make_platform(code: Code, capability: tuple[int, int]) -> object:
    """Return the release's own CUDA platform, which reports ``capability`` for every device."""
    base = code.get("vllm/platforms/cuda.py", "CudaPlatformBase")
    value = code.get("vllm/platforms/interface.py", "DeviceCapability")(*capability)
    answer = classmethod(lambda _cls, *_device, **_named: value)
    return type("Device", (base,), {"get_device_capability": answer})()


class _Chosen(BaseException):
    """Carry the chosen kernel class out of the code before it constructs the kernel.

    The construction needs a device. No ``except Exception`` of the release catches this class.
    """


def fp8_linear(code: Code, scales: str) -> str:
    """Return the name of the kernel class of an FP8 linear layer.

    For releases without kernel classes, return the name of the function (block scales) or of the
    backend (others). ``scales`` is a key of ``SCALES``.
    """
    if scales == "block" and code.has(_FP8, "W8A8BlockFp8LinearOp"):
        code.put(_FP8, "QuantFP8", Anything("QuantFP8"))
        shape = code.get(KEYS, "GroupShape")
        cutlass = code.get(_W8A8, "cutlass_block_fp8_supported")()
        operator = code.get(_FP8, "W8A8BlockFp8LinearOp")(
            shape(128, 128), shape(1, 128), cutlass_block_fp8_supported=cutlass
        )
        return str(operator.w8a8_blockscale_op.__name__)

    if code.has(_W8A8, "Fp8LinearOp"):
        code.put(_W8A8, "QuantFP8", Anything("QuantFP8"))
        operator = code.get(_W8A8, "Fp8LinearOp")(False, pad_output=False)
        return str(operator.preferred_backend)

    return _registered_kernel(code, scales)


def _registered_kernel(code: Code, scales: str) -> str:
    """Return the name of the kernel class that the registry of a release (0.16 on) chooses.

    Raises ProofError if the release does not choose it with the expected function.
    """
    path = next(path for path in REGISTRIES if code.has(path, _FP8_INIT))
    weight_key, activation_key = SCALES[scales]
    init = code.get(path, _FP8_INIT)
    choose = code.get(path, _CHOOSE)

    def stop(*args: object, **named: object) -> None:
        raise _Chosen(choose(*args, **named))

    code.put(path, _CHOOSE, stop)

    layer = {
        "weight_quant_key": code.get(KEYS, weight_key),
        "activation_quant_key": code.get(KEYS, activation_key),
        "input_dtype": Anything("torch.bfloat16"),
        "out_dtype": Anything("torch.bfloat16"),
        "weight_shape": (4096, 4096),
    }

    try:
        _call_with_known(init, layer)
    except _Chosen as chosen:
        return str(chosen.args[0].__name__)
    raise ProofError(f"{path}: {_FP8_INIT} does not call {_CHOOSE}")


def _call_with_known(
    function: Callable[..., Any],
    arguments: Mapping[str, object],
) -> Any:
    """Call a function of a release with those arguments for which it has parameters."""
    parameters = inspect.signature(function).parameters
    return function(
        **{name: value for name, value in arguments.items() if name in parameters}
    )


def nvfp4_linear(code: Code) -> str:
    """Return the name of the kernel class of an NVFP4 linear layer.

    For releases before 0.20, return the name of its backend.
    """
    if code.has(REGISTRIES[0], _NVFP4_INIT):
        return type(code.get(REGISTRIES[0], _NVFP4_INIT)()).__name__
    if code.has(_NVFP4, "select_nvfp4_linear_backend"):
        return str(code.get(_NVFP4, "select_nvfp4_linear_backend")().name)
    return str(code.get(_MODELOPT, "ModelOptNvFp4LinearMethod")(Off()).backend)


def nvfp4_scheme(code: Code) -> str:
    """Return the name of the class that runs an NVFP4 layer of a compressed-tensors checkpoint.

    Only releases before 0.16 decide this way.
    """
    choose = code.get(_COMPRESSED, "CompressedTensorsConfig._get_scheme_from_parts")
    for name in ("CompressedTensorsW4A4Fp4", "CompressedTensorsW4A16Fp4"):
        code.put(_COMPRESSED, name, lambda name=name, **_named: name)
    code.put(_COMPRESSED, "is_activation_quantization_format", lambda _format: True)

    config = Off(
        _is_fp4a4_nvfp4=lambda *_quants: True,
        _is_nvfp4_format=lambda *_quants: True,
        **dict.fromkeys(_NAMES["other_schemes"], lambda *_quants: False),
    )
    return str(choose(config, Off(), Off(), format="nvfp4-pack-quantized"))


def nvfp4_moe(code: Code, *, is_weight_only: bool = False) -> str:
    """Return the name of the backend of an NVFP4 MoE layer.

    Releases before 0.14 name no backend. For them, the result is "MARLIN", "FLASHINFER_CUTLASS" or
    "VLLM_CUTLASS", by the flags that they set.
    """
    select = "select_nvfp4_moe_backend"
    if code.has(NVFP4_MOE, select):
        keys = ("kNvfp4Static", "" if is_weight_only else "kNvfp4Dynamic")
        return select_backend(code, code.get(NVFP4_MOE, select), {}, keys)

    support = code.get(_NVFP4_SUPPORT, "detect_nvfp4_moe_support")()
    if support.use_marlin:
        return "MARLIN"
    return "FLASHINFER_CUTLASS" if support.allow_flashinfer else "VLLM_CUTLASS"


def select_backend(
    code: Code,
    select: Callable[..., Any],
    arguments: Mapping[str, object],
    keys: tuple[str, str],
) -> str:
    """Return the name of the backend that a release's own function selects for an MoE layer.

    ``keys`` are names in the release's ``quant_utils.py`` for the quantization of weights and of
    activations, "" for none.
    """
    if "weight_key" in inspect.signature(select).parameters:
        weight_key, activation_key = (
            code.get(KEYS, key) if key else None for key in keys
        )
        arguments = {
            **arguments,
            "config": _moe_config(code),
            "weight_key": weight_key,
            "activation_key": activation_key,
        }

    chosen = _call_with_known(select, arguments)
    backend = chosen[0] if isinstance(chosen, tuple) else chosen
    return str(backend.name)


def _moe_config(code: Code) -> Off:
    """Return the configuration of an MoE layer on one GPU.

    It has 64 experts of 768 by 2048: half the experts of Qwen3-30B-A3B.
    """
    has_enum = code.has(_ACTIVATION, "MoEActivation")
    silu = code.get(_ACTIVATION, "MoEActivation").SILU if has_enum else "silu"

    configuration = code.names["get_current_vllm_config"]()
    return Off(
        moe_backend=configuration.kernel_config.moe_backend,
        activation=silu,
        in_dtype=Anything("torch.bfloat16"),
        is_act_and_mul=True,
        swiglu_limit=None,
        hidden_dim=2048,
        hidden_dim_unpadded=2048,
        intermediate_size_per_partition=768,
        num_experts=64,
        num_local_experts=64,
        experts_per_token=8,
        router_logits_dtype=None,
        moe_parallel_config=Off(ep_size=1, tp_size=1, dp_size=1),
    )
