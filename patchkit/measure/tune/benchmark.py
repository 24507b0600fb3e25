"""Time fused-MoE configs with a release's own benchmark_moe.py. Run by the Python that has vLLM.

A script of its own, standard library and vLLM only: that Python need not have patchkit. One JSON
object a line on standard input and output. An empty one comes first, once torch and vLLM are known
to be there. The first request is the job, its answer the facts of device and release; then each
request is a config, its answer ``microseconds``, ``unfit`` or ``error``. Ends with its input.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CLEAR_EVERY = 50  # measurements; upstream's tuner does the same against running out of memory


class RefusalError(Exception):
    """The reason why this machine or release cannot measure; ``kind`` is for the caller."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def main() -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints to standard output, where answers alone may go
    if isinstance(sys.stdout, io.TextIOWrapper):  # its last words count if it dies
        sys.stdout.reconfigure(line_buffering=True)
    # vLLM could import a neighbour of this script instead of a module of that name.
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    requests = iter(sys.stdin.readline, "")
    try:
        _look_for_libraries()
        answers.write("{}\n")
        job = json.loads(next(requests))
        bench = Bench(job)
        answers.write(json.dumps(bench.facts()) + "\n")
        for request in requests:
            answers.write(json.dumps(bench.answer(json.loads(request))) + "\n")
    except RefusalError as refusal:
        answers.write(json.dumps({"error": str(refusal), "kind": refusal.kind}) + "\n")


class Bench:
    """A release's benchmark, bound to one MoE shape."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.torch = _torch()
        self.module = _benchmark(job["benchmark"])
        self.torch.set_default_device("cuda")
        self.torch.manual_seed(0)
        self.fp8 = job["dtype"] == "fp8_w8a8"
        self.measured = 0

    def facts(self) -> dict[str, Any]:
        """Return device, versions, file name, and the release's search space, defaults and file."""
        triton, vllm = map(importlib.import_module, ("triton", "vllm"))
        device = self.torch.cuda.get_device_properties(0)
        job, block = self.job, self.job["block_shape"]
        get = self._function
        dtype = get("_get_config_dtype_str")(self.torch.bfloat16, use_fp8_w8a8=self.fp8)
        name = get("get_config_file_name")(job["experts"], job["intermediate"], dtype, block)
        shipped = get("get_moe_configs")(
            job["experts"], job["intermediate"], dtype, *(block or (None, None))
        )
        default = get("get_default_config")
        defaults = {
            size: default(
                size,
                job["experts"],
                2 * job["intermediate"],
                job["hidden"],
                job["topk"],
                dtype,
                block,
            )
            for size in job["batch_sizes"]
        }
        return {
            "device": device.name,
            "capability": [device.major, device.minor],
            "shared_memory": device.shared_memory_per_block_optin,
            "memory": device.total_memory,
            "vllm": vllm.__version__,
            "torch": self.torch.__version__,
            "triton": triton.__version__,
            "name": name,
            "space": get("get_configs_compute_bound")(not self.fp8, block),
            "defaults": defaults,
            "shipped": shipped,
        }

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Time one config: ``batch_size``, ``config``, ``iterations``."""
        self.measured += 1
        # Not every release has this function.
        if self.measured % _CLEAR_EVERY == 0 and hasattr(self.module, "clear_triton_cache"):
            self.module.clear_triton_cache()
        job = self.job
        try:
            time = self._function("benchmark_config")(
                config=request["config"],
                num_tokens=request["batch_size"],
                num_experts=job["experts"],
                # Gate and up projection lie in one matrix, so upstream counts both.
                shard_intermediate_size=2 * job["intermediate"],
                hidden_size=job["hidden"],
                topk=job["topk"],
                dtype=self.torch.bfloat16,
                use_fp8_w8a8=self.fp8,
                use_int8_w8a16=False,
                num_iters=request["iterations"],
                block_quant_shape=job["block_shape"],
            )
        except Exception as error:  # noqa: BLE001 - whatever a config provokes is an answer
            message = f"{type(error).__name__}: {str(error).strip()[:300]}"
            # Triton's own errors: the config asks for more than the device has.
            unfit = type(error).__module__.startswith("triton")
            return {"unfit" if unfit else "error": message, "kind": "measurement"}
        return {"microseconds": time}

    def _function(self, name: str) -> Any:
        if not hasattr(self.module, name):
            raise RefusalError("release", f"benchmark_moe.py of this release has no {name}")
        return getattr(self.module, name)


def _look_for_libraries() -> None:
    """Refuse in milliseconds what would fail only after a source is fetched and unpacked."""
    for name in ("torch", "vllm"):
        if importlib.util.find_spec(name) is None:
            raise RefusalError("vllm", f"{name} cannot be imported: No module named {name!r}")


def _torch() -> Any:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise RefusalError("vllm", f"torch cannot be imported: {error}") from None
    if not torch.cuda.is_available():
        raise RefusalError("gpu", "torch sees no CUDA device")
    return torch


def _benchmark(path: str) -> Any:
    """Import the release's benchmark, without ray, which only spreads it over several GPUs."""
    try:
        importlib.import_module("vllm")
    except ImportError as error:
        raise RefusalError("vllm", f"vllm cannot be imported: {error}") from None
    spec = importlib.util.spec_from_file_location("benchmark_moe", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        with _without_ray():
            spec.loader.exec_module(module)
    except ImportError as error:
        raise RefusalError("release", f"{path} does not fit the installed vLLM: {error}") from None
    return module


@contextlib.contextmanager
def _without_ray() -> Iterator[None]:
    """Import stand-ins as ray: the file names it when loaded, one GPU never calls it."""
    ray = types.ModuleType("ray")
    bars = types.ModuleType("ray.experimental.tqdm_ray")
    vars(ray)["remote"] = lambda **_: lambda cls: cls
    vars(bars)["tqdm"] = iter
    package = types.ModuleType("ray.experimental")
    names = {module.__name__: module for module in (ray, package, bars)}
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


if __name__ == "__main__":
    main()
