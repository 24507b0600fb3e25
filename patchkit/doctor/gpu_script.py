"""Try what vLLM needs of a GPU, one step for each run. Run by the Python that has vLLM.

The script imports the standard library, torch and vLLM only: that Python need not have patchkit.
Its arguments are the name of a step and the step's settings as JSON, with a limit of ``seconds``.
The last line of standard output is ``MARK`` and JSON: ``state`` is ok, failed or not-run,
``reason`` says why, ``kernel`` is the kernel that ran, ``figures`` are the measurements. A step
that exceeds its limit prints its stack and ends itself.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

MARK = "patchkit-gpu: "
_BYTES_PER_GIB = 2**30
# Bytes of device memory: more than any step and CUDA itself need.
_LEAST_FREE = 2 * _BYTES_PER_GIB
_NOT_THERE = "torch sees no CUDA device"
# The largest allowed error of a product, in units of the result's root mean square.
# Operands are exact in their formats. So are the scales that a kernel may compute for activations,
# since each group holds the largest value of the format. Whichever kernel runs, only the rounding
# of the sum is left: rounding a value between 4 and 8 units to bfloat16 costs up to 0.016, and
# Hopper's FP8 tensor cores keep about 13 bits of a running sum, which costs 0.01. The bound is 1.5
# times the sum of both. A wrong scale or a swapped row costs 0.1 or more.
_PRODUCT = 0.04
_FP8_MAX = 448.0
# The values of the four-bit format E2M1 that are not negative.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# For decoding and prefill, which use different tiles and often different kernels.
_TOKENS = (1, 64)
_WIDE = 1024
_DEEP = 2048
_BUFFER = 512 << 20  # bytes that no cache of a GPU holds
_KERNELS_BETWEEN = 20  # as many as about half a layer has

Answer = dict[str, Any]
# triton.language, which try_triton imports: the kernel must find it under this global name.
tl: Any = None


class NotRunError(Exception):
    """The reason why a step cannot be tried here."""


class WrongError(Exception):
    """A result is wrong: the arguments are the reason, and further fields of the answer."""


def main() -> None:
    """Run the step that the arguments name, and write its answer."""
    answers = os.dup(1)
    # vLLM and NCCL print to standard output, where only the answer may go.
    os.dup2(2, 1)

    # Else an import could find a file in the folder of this script.
    folder = str(Path(__file__).parent)
    sys.path[:] = [path for path in sys.path if path != folder]
    settings = json.loads(sys.argv[2])
    faulthandler.enable()
    faulthandler.dump_traceback_later(settings["seconds"], exit=True)

    try:
        run_step = STEPS[sys.argv[1]]
        answer = {"state": "ok", **run_step(settings)}
    except NotRunError as error:
        answer = {"state": "not-run", "reason": str(error)}
    except WrongError as error:
        reason, more = error.args
        answer = {
            "state": "failed",
            "reason": reason,
            **more,
        }
    except (AttributeError, TypeError) as error:
        if "_OpNamespace" in str(error):  # an operator that the compiled library lacks
            raise
        traceback.print_exc()
        reason = (
            f"vLLM, torch or Triton is called otherwise here: {error}".splitlines()[0]
        )
        answer = {"state": "not-run", "reason": reason}

    # A single write, which begins with a line feed: NCCL's threads print at the same time.
    os.write(answers, f"\n{MARK}{json.dumps(answer)}\n".encode())
    sys.stdout.flush()
    os._exit(0)  # the clean-up of a library may hang, and is not part of the step


def _require_device() -> Any:
    """Return the module torch. Raise NotRunError if it cannot be imported or sees no GPU."""
    try:
        torch = import_module("torch")
    except ImportError as error:
        raise NotRunError(f"torch cannot be imported: {error}") from None

    if not torch.version.cuda:
        raise NotRunError(f"torch {torch.__version__} is built without CUDA")

    if not torch.cuda.is_available():
        # The error of this call tells a driver that is too old from a missing one.
        try:
            torch.cuda.init()
        except Exception as error:  # noqa: BLE001 - its words are the answer
            raise NotRunError(f"{_NOT_THERE}: {error}".splitlines()[0]) from None
        raise NotRunError(_NOT_THERE)

    return torch


def _require_gpu() -> Any:
    """Return the module torch. Raise NotRunError without a GPU or enough free memory on it."""
    torch = _require_device()
    free, _memory = torch.cuda.mem_get_info()
    if free < _LEAST_FREE:
        gib = f"{free / _BYTES_PER_GIB:.1f} GiB"
        raise NotRunError(f"only {gib} of the GPU's memory are free")

    return torch


def try_device(_: Answer) -> Answer:
    """Return the device's name, capability and memory, after it has computed a sum."""
    torch = _require_device()
    ones = torch.ones(
        1000,
        device="cuda",
        dtype=torch.float64,
    )
    total = float(ones.cumsum(0).sum())
    if total != 500500:
        raise WrongError(f"the sum of 1 to 1000 is {total:g} on the GPU", {})

    device = torch.cuda.get_device_properties(0)

    free, memory = torch.cuda.mem_get_info()
    return {
        "figures": {
            "device": device.name,
            "capability": f"{device.major}.{device.minor}",
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "free_gib": round(free / _BYTES_PER_GIB, 2),
            "memory_gib": round(memory / _BYTES_PER_GIB, 2),
        }
    }


def try_triton(_: Answer) -> Answer:
    """Compile a Triton kernel without a cache, run it, and compare with a product in float64."""
    torch = _require_gpu()
    with tempfile.TemporaryDirectory() as place:
        # A kernel from the user's cache would not test the compiler.
        os.environ["TRITON_CACHE_DIR"] = place
        try:
            compiler = import_module("triton")
            globals()["tl"] = import_module("triton.language")
        except ImportError as error:
            raise NotRunError(f"triton cannot be imported: {error}") from None

        kernel = compiler.jit(_triton_product)
        size = 64
        torch.manual_seed(0)
        a, b = torch.randn(
            2,
            size,
            size,
            device="cuda",
            dtype=torch.float16,
        )
        out = torch.full_like(a, float("nan"), dtype=torch.float32)

        start = time.perf_counter()
        kernel[(1,)](a, b, out, SIZE=size)
        torch.cuda.synchronize()

        seconds = round(time.perf_counter() - start, 2)
        exact = a.double() @ b.double() + 1
        return _judge_products(
            "tl.dot",
            [(out, exact)],
            triton=compiler.__version__,
            compile_seconds=seconds,
        )


def _triton_product(a, b, out, SIZE: "tl.constexpr"):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202, N803, UP037
    rows = tl.arange(0, SIZE)[:, None] * SIZE
    places = rows + tl.arange(0, SIZE)[None, :]
    left = tl.load(a + places)
    product = tl.dot(left, tl.load(b + places))
    tl.store(out + places, product + 1)


def try_fp8(settings: Answer) -> Answer:
    """Multiply with FP8 weights as a linear layer of vLLM does.

    With the setting ``block``, such as 128, each block of 128 by 128 weights has a scale, else all
    weights share one.
    """
    torch = _require_gpu()
    torch.manual_seed(0)
    block = settings.get("block", 0)
    # Keep vLLM from rounding the scales for DeepGEMM: that would change the weights.
    os.environ["VLLM_USE_DEEP_GEMM_E8M0"] = "0"

    def make_values(*shape: int) -> Any:
        values = torch.randn(*shape, device="cuda") * 64
        return values.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)

    inputs = [make_values(tokens, _DEEP) for tokens in _TOKENS]
    for x in inputs:
        x[:, ::128] = _FP8_MAX

    weight = make_values(_WIDE, _DEEP)
    scale = torch.tensor([0.01], device="cuda")
    scales = scale
    if block:
        scale = torch.rand(_WIDE // block, _DEEP // block, device="cuda")
        scale = scale * 0.01 + 0.005
        scales = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)

    exact = weight.double() * scales.double()

    with _vllm_groups(torch):
        fp8 = import_module("vllm.model_executor.layers.quantization.fp8")
        shape = [block, block] if block else None
        config = fp8.Fp8Config(True, "dynamic", weight_block_size=shape)

        layer = torch.nn.Module()
        with torch.device("cuda"):
            method = fp8.Fp8LinearMethod(config)
            method.create_weights(
                layer,
                _DEEP,
                [_WIDE],
                _DEEP,
                _WIDE,
                torch.bfloat16,
                weight_loader=lambda *_: None,
            )

        layer.weight.data.copy_(weight)

        layer_scale = layer.weight_scale_inv if block else layer.weight_scale
        layer_scale.data.copy_(scale)
        method.process_weights_after_loading(layer)

        kernel = getattr(method, "fp8_linear", None)
        name = "unknown" if kernel is None else type(kernel).__name__

        products = [
            (method.apply(layer, x.bfloat16()), x.double() @ exact.t()) for x in inputs
        ]
        return _judge_products(name, products)


def try_nvfp4(_: Answer) -> Answer:
    """Multiply with NVFP4 weights by the kernel that vLLM chooses on this device."""
    torch = _require_gpu()
    torch.manual_seed(0)
    negative = tuple(-value for value in _E2M1)
    values = torch.tensor(_E2M1 + negative, device="cuda")
    inputs = []
    for tokens in _TOKENS:
        input_codes = torch.randint(0, 16, (tokens, _DEEP), device="cuda")
        x = values[input_codes]
        x[:, ::16] = max(_E2M1)
        inputs.append(x)

    codes = torch.randint(0, 16, (_WIDE, _DEEP), device="cuda")
    wide_scales = torch.rand(_WIDE, _DEEP // 16, device="cuda")
    scales = (wide_scales * 3 + 1).to(torch.float8_e4m3fn)
    overall = 0.02
    group_scales = scales.double().repeat_interleave(16, 1)
    exact = values[codes].double() * group_scales * overall

    with _vllm_groups(torch):
        linear = import_module("vllm.model_executor.kernels.linear")
        if not hasattr(linear, "init_nvfp4_linear_kernel"):
            raise NotRunError("this vLLM does not say which NVFP4 kernel it takes")

        kernel = linear.init_nvfp4_linear_kernel()

        high = codes[:, 1::2] << 4
        packed = codes[:, ::2] | high
        # The parameters that vLLM's loading leaves for its NVFP4 kernels.
        layer = torch.nn.Module()
        # The global scale of activations is 1, so that the scale of each group is exact.
        unit = torch.tensor(1.0, device="cuda")
        parameters = {
            "weight": packed.to(torch.uint8),
            "weight_scale": scales,
            "weight_global_scale": unit * overall,
            "input_global_scale": unit.clone(),
            "input_global_scale_inv": unit.clone(),
            "alpha": unit * overall,
        }
        for name, value in parameters.items():
            setattr(
                layer,
                name,
                torch.nn.Parameter(value, requires_grad=False),
            )

        layer.logical_widths = [_WIDE]
        layer.input_size_per_partition = _DEEP
        layer.output_size_per_partition = _WIDE
        layer.params_dtype = torch.bfloat16
        kernel.process_weights_after_loading(layer)

        products = [
            (kernel.apply_weights(layer, x.bfloat16()), x.double() @ exact.t())
            for x in inputs
        ]
        return _judge_products(type(kernel).__name__, products)


@contextmanager
def _vllm_groups(torch: Any) -> Iterator[None]:
    """Set up the config and the process groups, of one rank each, that vLLM's layers need.

    Raise NotRunError if vLLM is not installed.
    """
    try:
        config = import_module("vllm.config")
        state = import_module("vllm.distributed.parallel_state")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "vllm":
            raise NotRunError(f"vllm cannot be imported: {error}") from None
        raise  # the step has to fail if vLLM is installed and does not load

    torch.set_default_dtype(torch.bfloat16)
    # A group of one rank needs no network.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    settings = config.VllmConfig()
    with (
        config.set_current_vllm_config(settings),
        tempfile.TemporaryDirectory() as place,
    ):
        state.init_distributed_environment(
            1,
            0,
            f"file://{place}/ranks",
            0,
            "gloo",
        )
        state.initialize_model_parallel(1, 1)
        # Layers read their type from the model's config, and those of DeepGEMM the text model's.
        # It is set only now, since vLLM would not make all groups for this stand-in.
        settings.model_config = types.SimpleNamespace(
            dtype=torch.bfloat16,
            is_moe=False,
            quantization_config=None,
            hf_text_config=types.SimpleNamespace(model_type=""),
        )
        yield


def try_all_reduce(settings: Answer) -> Answer:
    """Add up data over all ranks, check the sums, and measure the time for each size.

    Settings are the number of this ``rank`` and of all ranks, ``world``, the URL ``meeting`` where
    the ranks meet, ``sizes`` in bytes, and, to time a CUDA graph too, its all-reduces: ``streak``.
    """
    world = settings["world"]
    torch = _require_gpu()
    torch.cuda.set_device(0)
    version = ".".join(map(str, torch.cuda.nccl.version()))
    figures: Answer = {"ranks": world, "nccl": version}

    dist = import_module("torch.distributed")
    dist.init_process_group(
        "nccl",
        init_method=settings["meeting"],
        rank=settings["rank"],
        world_size=world,
        timeout=timedelta(seconds=0.8 * settings["seconds"]),
    )
    for size in settings["sizes"]:
        data = torch.empty(
            size // 4,
            device="cuda",
            dtype=torch.float32,
        )
        times = []
        for turn in range(12):
            data.fill_(settings["rank"] + 1 + turn)
            torch.cuda.synchronize()
            start = time.perf_counter()
            dist.all_reduce(data)
            torch.cuda.synchronize()

            times.append(time.perf_counter() - start)

            expected = world * (world + 1) // 2 + world * turn
            wrong = int((data != expected).sum())
            if wrong:
                fault = f"{wrong} of {data.numel()} sums over {world} ranks are wrong"
                raise WrongError(fault, {})

        # The median, without the first two calls, which make connections.
        seconds = sorted(times[2:])[5]
        # The bytes that cross each rank's link: the bus bandwidth of nccl-tests.
        moved = size * 2 * (world - 1) / world

        figures[f"microseconds_{size}"] = round(seconds * 1e6, 1)
        figures[f"gigabytes_per_second_{size}"] = round(moved / seconds / 1e9, 3)

        if streak := settings.get("streak"):
            seconds = _time_reductions(torch, dist, data, streak)
            figures[f"microseconds_in_a_graph_{size}"] = round(seconds * 1e6, 1)

    dist.barrier()
    return {"figures": figures}


def _time_reductions(torch: Any, dist: Any, data: Any, streak: int) -> float:
    """Return the seconds that each of ``streak`` all-reduces adds to a graph of short kernels.

    As in a step, those stand between them: 7.2 microseconds each with torch on two H200, but 18.5
    back to back. NCCL called without torch took 6.9 back to back.
    """
    kernels = [partial(data.mul_, 1.0)] * _KERNELS_BETWEEN
    reduction = partial(dist.all_reduce, data)
    alone = _time_graph(torch, kernels * streak)

    both = _time_graph(torch, [*kernels, reduction] * streak)
    return (both - alone) / streak


def try_decode(settings: Answer) -> Answer:
    """Measure what limits a decoding step: the memory, and a short kernel in a CUDA graph.

    The bandwidth is that of a copy or that of a product with one vector, whichever is more.
    Settings are the width ``hidden``, the ``tokens`` of a step, and the number of short kernels in
    a row, ``streak``.
    """
    torch = _require_gpu()
    hidden = settings["hidden"]
    streak = settings["streak"]

    kind = {"device": "cuda", "dtype": torch.bfloat16}
    weights = torch.zeros(_BUFFER // (2 * hidden), hidden, **kind)
    tokens = torch.zeros(settings["tokens"], hidden, **kind)

    copy = partial(weights.clone().copy_, weights)
    copied = 2 * weights.nbytes / _time_graph(torch, [copy])
    product = partial(torch.matmul, tokens[:1], weights.t())
    read = weights.nbytes / _time_graph(torch, [product])

    kernels = [partial(tokens.mul_, 1.0)] * streak
    seconds = _time_graph(torch, kernels) / streak
    return {
        "figures": {
            "gigabytes_per_second": round(max(copied, read) / 1e9, 1),
            "kernel_milliseconds": round(seconds * 1000, 6),
        }
    }


def _time_graph(torch: Any, kernels: Sequence[Callable[[], object]]) -> float:
    """Return the seconds of one run of kernels as a CUDA graph: the mean of ten replays."""
    for launch in kernels:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in kernels:
            launch()
    graph.replay()

    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(10):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 10_000  # ten replays, in milliseconds


def try_routing(settings: Answer) -> Answer:
    """Build a model of random weights and generate four tokens.

    The answer is empty: vLLM logs which kernels it chose.
    """
    _require_gpu()
    vllm = import_module("vllm")
    with tempfile.TemporaryDirectory() as place:
        config = json.dumps({**settings["base"], **settings["config"]})
        Path(place, "config.json").write_text(config, encoding="utf-8")

        engine = vllm.LLM(place, **settings["engine"])

    sampling = vllm.SamplingParams(
        temperature=0,
        max_tokens=4,
        ignore_eos=True,
        detokenize=False,
    )
    engine.generate(
        [{"prompt_token_ids": [5, 6, 7]}],
        sampling,
        use_tqdm=False,
    )
    return {}


def _judge_products(
    kernel: str,
    products: Iterable[tuple[Any, Any]],
    **figures: Any,
) -> Answer:
    """Return the answer for pairs of a product and its exact value, with the largest error.

    Raise WrongError, with the answer, if the error is above the bound.
    """
    error = max(_largest_error(out, exact) for out, exact in products)
    # JSON has no infinity.
    figures = {
        "error": float(f"{min(error, 1e30):.2g}"),
        "bound": _PRODUCT,
        **figures,
    }

    if vllm := sys.modules.get("vllm"):
        figures["vllm"] = str(getattr(vllm, "__version__", "unknown"))

    answer = {"figures": figures, "kernel": kernel}
    if error > _PRODUCT:
        fault = f"{kernel}: the product is wrong: error {error:.2g}, bound {_PRODUCT}"
        raise WrongError(fault, answer)

    return answer


def _largest_error(out: Any, exact: Any) -> float:
    """Return a product's largest error, in units of the exact product's root mean square.

    NaN counts as infinity.
    """

    unit = exact.square().mean().sqrt()
    errors = (out.double() - exact).abs() / unit
    return float(errors.nan_to_num(nan=float("inf")).max())


STEPS: dict[str, Callable[[Answer], Answer]] = {
    "cuda": try_device,
    "triton": try_triton,
    "fp8": try_fp8,
    "nvfp4": try_nvfp4,
    "all-reduce": try_all_reduce,
    "decode": try_decode,
    "routing": try_routing,
}

if __name__ == "__main__":
    main()
