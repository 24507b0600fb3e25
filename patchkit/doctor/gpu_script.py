"""Try what vLLM needs of a GPU, one step a run. Run by the Python that has vLLM.

A script of its own, standard library, torch and vLLM only: that Python need not have patchkit.
Arguments: a step's name, its settings as JSON, with ``seconds`` to try for. Its last words on
standard output are a line that begins with a mark, with JSON: ``state`` is ok, failed or not-run,
``reason`` says why, ``kernel`` is what was taken, ``figures`` are what was measured. Whatever else
it prints goes to standard error. A step that takes too long prints where it is and ends itself.

The operands of matrix products are exact in their formats, and so are the scales that a kernel may
take for the activations: each group holds the largest value of the format. What is left is the
rounding of the sum, so the bound holds whichever kernel is taken.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

MARK = "patchkit-gpu: "
_BYTES_PER_GIB = 2**30
_LEAST_FREE = 2 * _BYTES_PER_GIB  # of device memory: more than any step takes, with CUDA's own
_NOT_THERE = "torch sees no CUDA device"
# Largest error of a product, in units of the result's root mean square. Rounding a value between 4
# and 8 of these to bfloat16 costs up to 0.016; Hopper's FP8 tensor cores keep about 13 bits of a
# running sum, 0.01. Half as much again; a wrong scale or a swapped row costs 0.1 and more.
_PRODUCT = 0.04
_FP8_MAX = 448.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # what four bits stand for, and their negatives
_TOKENS = (1, 64)  # decoding and prefill: other tiles, often other kernels
_WIDE, _DEEP = 1024, 2048

Answer = dict[str, Any]
tl: Any = None  # triton.language, once it is imported: a kernel has to find it by this name


class NotRunError(Exception):
    """The reason why a step cannot be tried here."""


class WrongError(Exception):
    """A step ran and its result is wrong; ``answer`` are its figures."""

    def __init__(self, what: str, **answer: Any) -> None:
        super().__init__(what)
        self.answer = answer


def main() -> None:
    """Run the step that the arguments name, and write its answer."""
    answers = os.dup(1)
    os.dup2(2, 1)  # vLLM and NCCL print to standard output, where the answer alone may go
    # A neighbour of this script is no module of that name.
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    step, settings = sys.argv[1], json.loads(sys.argv[2])
    faulthandler.enable()
    faulthandler.dump_traceback_later(settings["seconds"], exit=True)
    try:
        answer = {"state": "ok", **STEPS[step](settings)}
    except NotRunError as error:
        answer = {"state": "not-run", "reason": str(error)}
    except WrongError as error:
        answer = {"state": "failed", "reason": str(error), **error.answer}
    except (AttributeError, TypeError) as error:
        if "_OpNamespace" in str(error):  # an operator that the compiled library lacks
            raise
        traceback.print_exc()
        reason = f"vLLM, torch or Triton is called otherwise here: {_first_line(error)}"
        answer = {"state": "not-run", "reason": reason}
    # One write with a line end before it: NCCL's threads print at the same time.
    os.write(answers, f"\n{MARK}{json.dumps(answer)}\n".encode())
    sys.stdout.flush()
    os._exit(0)  # a library's end may hang, and says nothing of the step


def _import_torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise NotRunError(f"torch cannot be imported: {error}") from None


def _require_gpu() -> Any:
    """Return torch; raise NotRunError without a GPU, or with too little free memory."""
    torch = _import_torch()
    if not torch.cuda.is_available():
        raise NotRunError(_NOT_THERE)
    free, _ = torch.cuda.mem_get_info()
    if free < _LEAST_FREE:
        raise NotRunError(f"only {free / _BYTES_PER_GIB:.1f} GiB of the GPU's memory are free")
    return torch


def try_device(_: Answer) -> Answer:
    """Name the device, and have it compute."""
    torch = _import_torch()
    if not torch.version.cuda:
        raise NotRunError(f"torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        # Says why: a driver that is too old is another thing than none.
        try:
            torch.cuda.init()
        except Exception as error:  # noqa: BLE001 - its words are the answer
            raise NotRunError(f"{_NOT_THERE}: {_first_line(error)}") from None
        raise NotRunError(_NOT_THERE)
    device = torch.cuda.get_device_properties(0)
    ones = torch.ones(1000, device="cuda", dtype=torch.float64)
    if (total := float(ones.cumsum(0).sum())) != 500500:
        raise WrongError(f"the sum of 1 to 1000 is {total:g} on the GPU")
    free, memory = torch.cuda.mem_get_info()
    driver = Path("/proc/driver/nvidia/version")
    said = driver.read_text(encoding="utf-8").split("\n")[0] if driver.is_file() else ""
    return {
        "figures": {
            "device": device.name,
            "capability": f"{device.major}.{device.minor}",
            "driver": next((word for word in said.split() if word[:1].isdigit()), ""),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "free_gib": round(free / _BYTES_PER_GIB, 2),
            "memory_gib": round(memory / _BYTES_PER_GIB, 2),
        }
    }


def try_triton(_: Answer) -> Answer:
    """Compile a kernel anew, run it, and compare with float64."""
    torch = _require_gpu()
    with tempfile.TemporaryDirectory() as place:
        # What lies in the user's cache would prove nothing of the compiler.
        os.environ["TRITON_CACHE_DIR"] = place
        try:
            compiler = importlib.import_module("triton")
            globals()["tl"] = importlib.import_module("triton.language")
        except ImportError as error:
            raise NotRunError(f"triton cannot be imported: {error}") from None
        size = 64
        kernel = compiler.jit(_triton_product)
        torch.manual_seed(0)
        a, b = (torch.randn(size, size, device="cuda", dtype=torch.float16) for _ in "ab")
        out = torch.full((size, size), float("nan"), device="cuda", dtype=torch.float32)
        start = time.perf_counter()
        kernel[(1,)](a, b, out, SIZE=size)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        worst = _product_error(out, a.double() @ b.double() + 1)
    version = compiler.__version__
    return _judge_error(worst, "tl.dot", triton=version, compile_seconds=round(seconds, 2))


def _triton_product(a, b, out, SIZE: "tl.constexpr"):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202, N803, UP037
    rows = tl.arange(0, SIZE)[:, None] * SIZE
    places = rows + tl.arange(0, SIZE)[None, :]
    product = tl.dot(tl.load(a + places), tl.load(b + places))
    tl.store(out + places, product + 1)


def try_fp8(settings: Answer) -> Answer:
    """Multiply with FP8 weights as a linear layer of vLLM does, by tensor or by blocks."""
    torch = _require_gpu()
    block = 128 if settings.get("block") else 0
    torch.manual_seed(0)

    def make_values(*shape: int) -> Any:
        values = torch.randn(*shape, device="cuda") * 64
        return values.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)

    def make_input(tokens: int) -> Any:
        x = make_values(tokens, _DEEP)
        x[:, ::128] = _FP8_MAX
        return x.to(torch.bfloat16)

    weight = make_values(_WIDE, _DEEP)
    scales = scale = torch.tensor([0.01], device="cuda")
    if block:
        scale = torch.rand(_WIDE // block, _DEEP // block, device="cuda") * 0.01 + 0.005
        scales = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
    exact = weight.double() * scales.double()
    with _vllm_groups(torch, groups=True):
        layer, method = _fp8_layer(torch, weight, scale, block)
        worst = _worst_product(make_input, lambda x: method.apply(layer, x), exact)
    taken = getattr(method, "fp8_linear", None)
    kernel = type(taken).__name__ if taken is not None else "unknown"
    return _judge_error(worst, kernel, vllm=_vllm_release())


def _fp8_layer(torch: Any, weight: Any, scale: Any, block: int) -> tuple[Any, Any]:
    """Return a layer as vLLM loads it from a checkpoint, and the method that multiplies."""
    place = "vllm.model_executor.layers.quantization.fp8"
    module = importlib.import_module(place)
    shape = [block, block] if block else None
    config = module.Fp8Config(True, "dynamic", weight_block_size=shape)
    layer = torch.nn.Module()
    with torch.device("cuda"):
        method = module.Fp8LinearMethod(config)
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
    (layer.weight_scale_inv if block else layer.weight_scale).data.copy_(scale)
    method.process_weights_after_loading(layer)
    return layer, method


def try_nvfp4(_: Answer) -> Answer:
    """Multiply with NVFP4 weights by the kernel that vLLM takes for them on this device."""
    torch = _require_gpu()
    torch.manual_seed(0)
    values = torch.tensor(_E2M1 + tuple(-value for value in _E2M1), device="cuda")

    def make_input(tokens: int) -> Any:
        x = values[torch.randint(0, 16, (tokens, _DEEP), device="cuda")]
        x[:, ::16] = max(_E2M1)
        return x.to(torch.bfloat16)

    codes = torch.randint(0, 16, (_WIDE, _DEEP), device="cuda")
    scales = (torch.rand(_WIDE, _DEEP // 16, device="cuda") * 3 + 1).to(torch.float8_e4m3fn)
    overall = 0.02
    exact = values[codes].double() * scales.double().repeat_interleave(16, 1) * overall
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    with _vllm_groups(torch):
        linear = importlib.import_module("vllm.model_executor.kernels.linear")
        if not hasattr(linear, "init_nvfp4_linear_kernel"):
            raise NotRunError(f"vLLM {_vllm_release()} does not say which NVFP4 kernel it takes")
        kernel = linear.init_nvfp4_linear_kernel()
        layer = _nvfp4_layer(torch, packed, scales, overall)
        kernel.process_weights_after_loading(layer)
        worst = _worst_product(make_input, lambda x: kernel.apply_weights(layer, x), exact)
    return _judge_error(worst, type(kernel).__name__, vllm=_vllm_release())


def _nvfp4_layer(torch: Any, packed: Any, scales: Any, overall: float) -> Any:
    """Return a layer with what vLLM's own loading leaves for its NVFP4 kernels."""
    layer = torch.nn.Module()

    def put(name: str, value: Any) -> None:
        setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))

    one = torch.tensor(1.0, device="cuda")  # so that a group's scale for activations is exact
    put("weight", packed)
    put("weight_scale", scales)
    put("weight_global_scale", one * overall)
    put("input_global_scale", one.clone())
    put("input_global_scale_inv", one.clone())
    put("alpha", one * overall)
    layer.logical_widths = [_WIDE]
    layer.input_size_per_partition, layer.output_size_per_partition = _DEEP, _WIDE
    layer.params_dtype = torch.bfloat16
    return layer


@contextmanager
def _vllm_groups(torch: Any, *, groups: bool = False) -> Iterator[None]:
    """Hold what vLLM's layers expect around them: a config, and groups of one rank."""
    try:
        config = importlib.import_module("vllm.config")
        state = importlib.import_module("vllm.distributed.parallel_state")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "vllm":
            raise NotRunError(f"vllm cannot be imported: {error}") from None
        raise  # a vLLM that is there and does not load is what the step looks for
    torch.set_default_dtype(torch.bfloat16)
    # The group of one rank is no test of the network.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with ExitStack() as stack:
        settings = config.VllmConfig()
        stack.enter_context(config.set_current_vllm_config(settings))
        if groups:
            place = stack.enter_context(tempfile.TemporaryDirectory())
            state.init_distributed_environment(1, 0, f"file://{place}/ranks", 0, "gloo")
            state.initialize_model_parallel(1, 1)
        # Layers ask it for their type; it is no model of which groups would be made.
        settings.model_config = types.SimpleNamespace(dtype=torch.bfloat16, is_moe=False)
        yield


def _vllm_release() -> str:
    return str(getattr(importlib.import_module("vllm"), "__version__", "unknown"))


def try_nccl(settings: Answer) -> Answer:
    """Name the libnccl of torch and of vLLM, and make a communicator of one rank."""
    torch = _require_gpu()
    # Before vLLM: it may load another one.
    figures = {"torch_version": ".".join(map(str, torch.cuda.nccl.version()))}
    with tempfile.TemporaryDirectory() as place:
        dist = importlib.import_module("torch.distributed")
        meeting, patience = f"file://{place}/ranks", timedelta(seconds=0.8 * settings["seconds"])
        dist.init_process_group("nccl", init_method=meeting, rank=0, world_size=1, timeout=patience)
        data = torch.full((1 << 20,), 3.0, device="cuda")
        dist.all_reduce(data)
        torch.cuda.synchronize()
        if not bool((data == 3).all()):
            raise WrongError("the sum over one rank is not its own data", figures=figures)
    try:
        wrapper = importlib.import_module("vllm.distributed.device_communicators.pynccl_wrapper")
        figures["vllm_version"] = str(wrapper.NCCLLibrary().ncclGetVersion())
    except ImportError as error:
        figures["vllm_version"] = f"unknown: {_first_line(error)}"
    return {"figures": figures, "kernel": f"NCCL {figures['torch_version']}"}


def try_all_reduce(settings: Answer) -> Answer:
    """Add up data over all ranks, and time it: ``rank``, ``world``, ``meeting``, ``backend``."""
    if settings["backend"] == "nccl":
        torch, device = _require_gpu(), "cuda"
        torch.cuda.set_device(0)
    else:
        torch, device = _import_torch(), "cpu"
    dist = importlib.import_module("torch.distributed")
    rank, world = settings["rank"], settings["world"]
    dist.init_process_group(
        settings["backend"],
        init_method=settings["meeting"],
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=0.8 * settings["seconds"]),
    )
    figures: Answer = {"ranks": world, "backend": settings["backend"]}
    if device == "cuda":
        figures["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for size in settings["sizes"]:
        seconds = _time_all_reduce(torch, dist, device, rank, world, size)
        # As nccl-tests counts: so much has to cross each rank's link, whatever their number.
        moved = size * 2 * (world - 1) / world
        figures[f"microseconds_{size}"] = round(seconds * 1e6, 1)
        figures[f"gigabytes_per_second_{size}"] = round(moved / seconds / 1e9, 3)
    dist.barrier()
    return {"figures": figures, "kernel": settings["backend"]}


def _time_all_reduce(torch: Any, dist: Any, device: str, rank: int, world: int, size: int) -> float:
    """Return the median time of an all-reduce; every sum is checked."""
    data = torch.empty(size // 4, device=device, dtype=torch.float32)
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for turn in range(12):
        data.fill_(rank + 1 + turn)
        wait()
        start = time.perf_counter()
        dist.all_reduce(data)
        wait()
        times.append(time.perf_counter() - start)
        expected = world * (world + 1) // 2 + world * turn
        if wrong := int((data != expected).sum()):
            raise WrongError(f"{wrong} of {data.numel()} sums over {world} ranks are wrong")
    return sorted(times[2:])[len(times[2:]) // 2]  # the first ones make connections


def _worst_product(
    make_input: Callable[[int], Any], multiply: Callable[[Any], Any], exact: Any
) -> float:
    """Return the largest error of products with ``exact`` weights, over a few numbers of tokens."""
    worst = 0.0
    for tokens in _TOKENS:
        x = make_input(tokens)
        worst = max(worst, _product_error(multiply(x), x.double() @ exact.t()))
    return worst


def _product_error(out: Any, exact: Any) -> float:
    """Return the largest error in units of the root mean square; NaN counts as infinite."""
    errors = (out.double() - exact).abs() / exact.square().mean().sqrt()
    return float(errors.nan_to_num(nan=float("inf")).max())


def _judge_error(error: float, kernel: str, **figures: Any) -> Answer:
    # JSON has no infinity.
    answer = {
        "figures": {"error": min(error, 1e30), "bound": _PRODUCT, **figures},
        "kernel": kernel,
    }
    if not error <= _PRODUCT:
        raise WrongError(
            f"{kernel}: the product is wrong: error {error:.2g}, bound {_PRODUCT}", **answer
        )
    return answer


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


STEPS: dict[str, Callable[[Answer], Answer]] = {
    "cuda": try_device,
    "triton": try_triton,
    "fp8": try_fp8,
    "nvfp4": try_nvfp4,
    "nccl": try_nccl,
    "all-reduce": try_all_reduce,
}

if __name__ == "__main__":
    main()
