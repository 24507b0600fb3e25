"""Call NVML with ctypes, without starting nvidia-smi. Names and layouts are those of nvml.h."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from patchkit.runtime.host.machine_root import ToolUnavailable

_LIBRARY = "libnvidia-ml.so.1"
_NONE = "[N/A]"  # as nvidia-smi writes what the driver does not support
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


def ask() -> str:
    """Return a line for each GPU, as `nvidia-smi` does. Raises ToolUnavailable."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise ToolUnavailable(str(error)) from None
    _need(library, "nvmlInit_v2")
    try:
        count = ctypes.c_uint()
        _need(library, "nvmlDeviceGetCount_v2", ctypes.byref(count))
        return "".join(f"{_row(library, number)}\n" for number in range(count.value))
    finally:
        _call(library, "nvmlShutdown")


@dataclass(frozen=True, slots=True)
class GpuState:
    """The temperature of the first GPU in degrees Celsius and its power in watts; None: unknown."""

    celsius: int | None
    watts: float | None


def gpu_state() -> GpuState:
    """Return how warm the first GPU is. Raises ToolUnavailable."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise ToolUnavailable(str(error)) from None
    _need(library, "nvmlInit_v2")
    try:
        gpu, degrees, milliwatts = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
        _need(library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(0), ctypes.byref(gpu))
        # 0 is NVML_TEMPERATURE_GPU, the only sensor there is.
        sensor = (gpu, ctypes.c_uint(0), ctypes.byref(degrees))
        hot = _call(library, "nvmlDeviceGetTemperature", *sensor)
        power = _call(library, "nvmlDeviceGetPowerUsage", gpu, ctypes.byref(milliwatts))
        return GpuState(None if hot else degrees.value, None if power else milliwatts.value / 1000)
    finally:
        _call(library, "nvmlShutdown")


def _row(library: ctypes.CDLL, number: int) -> str:
    gpu = ctypes.c_void_p()
    _need(library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(number), ctypes.byref(gpu))
    name = _text(library, "nvmlDeviceGetName", gpu)
    driver = _text(library, "nvmlSystemGetDriverVersion")
    return ", ".join(
        (name, _capability(library, gpu), driver, _mib(library, gpu), _bus(library, gpu))
    )


def _capability(library: ctypes.CDLL, gpu: ctypes.c_void_p) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    name = "nvmlDeviceGetCudaComputeCapability"
    failed = _call(library, name, gpu, ctypes.byref(major), ctypes.byref(minor))
    return _NONE if failed else f"{major.value}.{minor.value}"


def _mib(library: ctypes.CDLL, gpu: ctypes.c_void_p) -> str:
    memory = _Memory()
    failed = _call(library, "nvmlDeviceGetMemoryInfo", gpu, ctypes.byref(memory))
    return _NONE if failed else str(memory.total >> 20)


def _bus(library: ctypes.CDLL, gpu: ctypes.c_void_p) -> str:
    pci = _Pci()
    failed = _call(library, "nvmlDeviceGetPciInfo_v3", gpu, ctypes.byref(pci))
    return _NONE if failed else pci.address.decode(errors="replace")


def _text(library: ctypes.CDLL, name: str, *of: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(_TEXT)
    failed = _call(library, name, *of, buffer, ctypes.c_uint(_TEXT))
    return _NONE if failed else buffer.value.decode(errors="replace")


def _need(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    if code := _call(library, name, *arguments):
        raise ToolUnavailable(f"{_LIBRARY}: {name}: error {code}: {_words(library, code)}")


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> int:
    """Return NVML's code: 13, as NVML itself does, for a function that this driver's lacks."""
    try:
        function = getattr(library, name)
    except AttributeError:
        return 13  # NVML_ERROR_FUNCTION_NOT_FOUND
    return int(function(*arguments))


def _words(library: ctypes.CDLL, code: int) -> str:
    try:
        library.nvmlErrorString.restype = ctypes.c_char_p
        return bytes(library.nvmlErrorString(code)).decode(errors="replace")
    except AttributeError:
        return "unknown"
