"""Call NVML with ctypes, without starting nvidia-smi. Names and layouts are those of nvml.h."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

from patchkit.runtime.host.machine_root import ToolUnavailable

_LIBRARY = "libnvidia-ml.so.1"
_NONE = "[N/A]"  # as nvidia-smi writes what the driver does not support
_MOST_PROCESSES = 64
_UNKNOWN = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE
_TEXT = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE; a version takes 80


# nvmlMemory_t
class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


# nvmlPciInfo_t
class _Pci(ctypes.Structure):
    _fields_ = (
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("id", ctypes.c_uint),
        ("subsystem", ctypes.c_uint),
        ("address", ctypes.c_char * 32),
    )


# nvmlProcessInfo_t of the functions whose names end in _v3
class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute", ctypes.c_uint),
    )


@contextlib.contextmanager
def _open_nvml() -> Iterator[ctypes.CDLL]:
    """Hold NVML open. Raises ToolUnavailable."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise ToolUnavailable(str(error)) from None
    _call_or_raise(library, "nvmlInit_v2")
    try:
        yield library
    finally:
        _call_nvml(library, "nvmlShutdown")


def ask() -> str:
    """Return a line for each GPU, as `nvidia-smi` does. Raises ToolUnavailable."""
    with _open_nvml() as library:
        count = ctypes.c_uint()
        _call_or_raise(library, "nvmlDeviceGetCount_v2", ctypes.byref(count))
        return "".join(f"{_gpu_row(library, number)}\n" for number in range(count.value))


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that computes on a GPU, and the MiB that it has there; None: unknown."""

    pid: int
    mib: int | None = None


@dataclass(frozen=True, slots=True)
class GpuState:
    """How the first GPU is; None is unknown.

    Degrees Celsius, watts, the limit of its power, MHz of its processors and the most that they
    have, how busy it is in percent, why its clocks are lower than they could be (NVML's bits), and
    the processes that compute on it.
    """

    celsius: int | None
    watts: float | None
    limit: float | None = None
    mhz: int | None = None
    most_mhz: int | None = None
    busy: int | None = None
    throttled: int | None = None
    processes: tuple[GpuProcess, ...] | None = None


def gpu_state() -> GpuState:
    """Return how the first GPU is. Raises ToolUnavailable."""
    with _open_nvml() as library:
        gpu = ctypes.c_void_p()
        _call_or_raise(
            library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(0), ctypes.byref(gpu)
        )

        def number(name: str, *before: object, wide: bool = False) -> int | None:
            found = ctypes.c_ulonglong() if wide else ctypes.c_uint()
            return (
                None
                if _call_nvml(library, name, gpu, *before, ctypes.byref(found))
                else found.value
            )

        watts, limit = number("nvmlDeviceGetPowerUsage"), number("nvmlDeviceGetEnforcedPowerLimit")
        return GpuState(
            # 0 is NVML_TEMPERATURE_GPU, the only sensor there is; 1 is NVML_CLOCK_SM.
            celsius=number("nvmlDeviceGetTemperature", ctypes.c_uint(0)),
            watts=None if watts is None else watts / 1000,
            limit=None if limit is None else limit / 1000,
            mhz=number("nvmlDeviceGetClockInfo", ctypes.c_uint(1)),
            most_mhz=number("nvmlDeviceGetMaxClockInfo", ctypes.c_uint(1)),
            busy=_busy_percent(library, gpu),
            throttled=number("nvmlDeviceGetCurrentClocksThrottleReasons", wide=True),
            processes=_gpu_processes(library, gpu),
        )


def _busy_percent(library: ctypes.CDLL, gpu: ctypes.c_void_p) -> int | None:
    both = (ctypes.c_uint * 2)()  # nvmlUtilization_t: processors, memory
    failed = _call_nvml(library, "nvmlDeviceGetUtilizationRates", gpu, both)
    return None if failed else int(both[0])


def _gpu_processes(library: ctypes.CDLL, gpu: ctypes.c_void_p) -> tuple[GpuProcess, ...] | None:
    count = ctypes.c_uint(_MOST_PROCESSES)
    table = (_Process * _MOST_PROCESSES)()
    name = "nvmlDeviceGetComputeRunningProcesses_v3"
    if _call_nvml(library, name, gpu, ctypes.byref(count), table):
        return None
    return tuple(
        GpuProcess(each.pid, None if each.memory == _UNKNOWN else each.memory >> 20)
        for each in table[: count.value]
    )


def _gpu_row(library: ctypes.CDLL, number: int) -> str:
    gpu = ctypes.c_void_p()
    _call_or_raise(
        library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(number), ctypes.byref(gpu)
    )
    name = _call_for_text(library, "nvmlDeviceGetName", gpu)
    driver = _call_for_text(library, "nvmlSystemGetDriverVersion")
    return ", ".join(
        (
            name,
            _compute_capability(library, gpu),
            driver,
            _memory_mib(library, gpu),
            _pci_address(library, gpu),
        )
    )


def _compute_capability(library: ctypes.CDLL, gpu: ctypes.c_void_p) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    name = "nvmlDeviceGetCudaComputeCapability"
    failed = _call_nvml(library, name, gpu, ctypes.byref(major), ctypes.byref(minor))
    return _NONE if failed else f"{major.value}.{minor.value}"


def _memory_mib(library: ctypes.CDLL, gpu: ctypes.c_void_p) -> str:
    memory = _Memory()
    failed = _call_nvml(library, "nvmlDeviceGetMemoryInfo", gpu, ctypes.byref(memory))
    return _NONE if failed else str(memory.total >> 20)


def _pci_address(library: ctypes.CDLL, gpu: ctypes.c_void_p) -> str:
    pci = _Pci()
    failed = _call_nvml(library, "nvmlDeviceGetPciInfo_v3", gpu, ctypes.byref(pci))
    return _NONE if failed else pci.address.decode(errors="replace")


def _call_for_text(library: ctypes.CDLL, name: str, *of: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(_TEXT)
    failed = _call_nvml(library, name, *of, buffer, ctypes.c_uint(_TEXT))
    return _NONE if failed else buffer.value.decode(errors="replace")


def _call_or_raise(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    if code := _call_nvml(library, name, *arguments):
        raise ToolUnavailable(f"{_LIBRARY}: {name}: error {code}: {_error_words(library, code)}")


def _call_nvml(library: ctypes.CDLL, name: str, *arguments: object) -> int:
    """Return NVML's code: 13, as NVML itself does, for a function that this driver's lacks."""
    try:
        function = getattr(library, name)
    except AttributeError:
        return 13  # NVML_ERROR_FUNCTION_NOT_FOUND
    return int(function(*arguments))


def _error_words(library: ctypes.CDLL, code: int) -> str:
    try:
        library.nvmlErrorString.restype = ctypes.c_char_p
        return bytes(library.nvmlErrorString(code)).decode(errors="replace")
    except AttributeError:
        return "unknown"
