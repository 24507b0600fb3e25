"""Total memory on a device that does not tell NVML, and the defaults that depend on it."""

import textwrap
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

from patchkit.recipes.vllm import kit

_CUDA = "vllm/platforms/cuda.py"
_MEMORY = "NvmlCudaPlatform.get_device_total_memory"
_UTILS = "vllm/utils/platform_utils.py"
_ARGS = "vllm/engine/arg_utils.py"
_DEFAULTS = "EngineArgs.get_batch_defaults"
_UPSTREAM = "is_gb10 = current_platform.is_device_capability((12, 1))"
_BYTES_PER_GIB = 1 << 30
_GB10_MEMORY = 119 * _BYTES_PER_GIB  # torch reports 119.6 to 121.7 GiB

_ASK_NVML = "return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)"
_ASK_CUDA_TOO = """\
try:
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
except pynvml.NVMLError as error:
    # A GB10 shares the memory of its CPU, which NVML does not count: nvidia-smi says [N/A].
    from vllm.utils.platform_utils import cuda_get_device_properties

    logger.info_once("patchkit: NVML has no memory total (%s); asking CUDA.", str(error))
    return int(cuda_get_device_properties(device_id, ("total_memory",))[0])
"""
_ASK_PLATFORM = "device_memory = current_platform.get_device_total_memory()"
_FORGET_GB10 = """\
device_memory = current_platform.get_device_total_memory()
if (
    current_platform.is_cuda()
    and current_platform.is_device_capability((12, 1))
):
    # A GB10 has the memory of a large device, not its speed: keep the small defaults.
    device_memory = 0
"""


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read the query, and the tier of default batch sizes that a GB10 would get by its answer."""
    cuda, args = tree.read(_CUDA), tree.read(_ARGS)
    if _UPSTREAM in args:
        return kit.upstream(f"{_ARGS}: a GB10 keeps the small defaults")
    query = partial(kit.swap, _CUDA, cuda, _MEMORY, _ASK_NVML, _ASK_CUDA_TOO)
    defaults = partial(kit.swap, _ARGS, args, _DEFAULTS, _ASK_PLATFORM, _FORGET_GB10)
    edits = kit.together(
        partial(query, note="CUDA if NVML cannot tell"),
        partial(defaults, note="keep the small defaults"),
    )
    return kit.found(
        edits,
        now=f"{_CUDA}: the total memory comes from NVML alone",
        done=f"{_CUDA}: CUDA answers where NVML cannot",
    )


def prove(case: kit.Case) -> str:
    """Check that the query answers on 12.1, and that a GB10 keeps the defaults of today."""
    (today,) = kit.ask(
        case.stock, [lambda: _defaults(kit.on_device(case.stock, *kit.GB10), _unknown)], object
    )
    kit.prove_decisions(
        case,
        [
            kit.Decision(_MEMORY, _memory, wanted=_GB10_MEMORY),
            kit.Decision(_DEFAULTS, _defaults, wanted=today),
        ],
    )
    return "the total memory is known on 12.1, default batch sizes stay as they are everywhere"


class _NVMLError(Exception):
    """Stands for ``pynvml.NVMLError``."""


def _unknown() -> int:
    raise _NVMLError


def _memory(code: kit.Code) -> object:
    capability = tuple(code.names["current_platform"].get_device_capability())

    def ask_nvml(_handle: object) -> object:
        total = 80 * _BYTES_PER_GIB if capability not in kit.GB10 else _unknown()
        return SimpleNamespace(total=total)

    nvml = SimpleNamespace(
        NVMLError=_NVMLError,
        nvmlDeviceGetHandleByIndex=kit.Anything(),
        nvmlDeviceGetMemoryInfo=ask_nvml,
    )
    code.put(_CUDA, "pynvml", nvml)
    code.put(_UTILS, "cuda_get_device_properties", lambda *_args: (_GB10_MEMORY,))
    return code.method(_CUDA, _MEMORY)(kit.Anything())


def _defaults(code: kit.Code, memory: Callable[[], int] = lambda: _GB10_MEMORY) -> object:
    platform = code.names["current_platform"]
    platform.get_device_total_memory = memory
    platform.get_device_name = lambda: "NVIDIA"
    return [
        {str(k): v for k, v in defaults.items()}
        for defaults in code.method(_ARGS, _DEFAULTS)(None, 1)
    ]


FIX = kit.Fix(
    id="nvml_total_memory",
    title="Total memory from CUDA where NVML has none, with the batch defaults as they are",
    symptom="NVMLError_NotSupported stops a worker with VLLM_ENABLE_STARTUP_PLAN=1.",
    why="A GB10 does not tell NVML how much memory it has. The engine's defaults swallow the error "
    "and take the small tier; the startup plan of 0.26 and later does not. With an answer a GB10 "
    "would count as a large device and batch 8192 tokens instead of 2048, so that tier is closed "
    "to it in the same fix.",
    needs=(
        kit.Need(">=0.11.1,<0.26", kit.Severity.OPTIONAL, "the only caller swallows the error"),
        kit.Need(
            ">=0.26,<0.33", kit.Severity.OPTIONAL, "VLLM_ENABLE_STARTUP_PLAN=1 stops the worker"
        ),
    ),
    upstream="0.33.0 asks CUDA as well, and keeps the small defaults on 12.1",
    evidence=(
        kit.Evidence("the query and all its callers, every release", "vLLM sources", "read"),
        kit.Evidence(
            "nvidia-smi shows [N/A] for the memory of a GB10", "NVIDIA's known issues", "read"
        ),
        kit.Evidence(
            "the defaults of 12.1 before and after, with and without an answer",
            "the functions, run with stand-ins",
            "measured",
        ),
    ),
    look=look,
    prove=prove,
    examples=(
        kit.Example(
            version="0.32.0",
            path=_CUDA,
            beside={
                _ARGS: "class EngineArgs:\n    def get_batch_defaults(cls):\n"
                + textwrap.indent(_FORGET_GB10, " " * 8)
            },
            before="class NvmlCudaPlatform:\n    def get_device_total_memory(cls, device_id):\n"
            f"        {_ASK_NVML}\n",
            after="class NvmlCudaPlatform:\n    def get_device_total_memory(cls, device_id):\n"
            + textwrap.indent(_ASK_CUDA_TOO, " " * 8),
        ),
    ),
)
