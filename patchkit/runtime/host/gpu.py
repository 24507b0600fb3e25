"""Ask for the GPUs: NVML, else nvidia-smi.

Both answer in the same form, a line for each GPU: name, compute capability, driver, memory
in MiB, PCI address. GB10 and Thor have no memory of their own, and both say so in several ways.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from patchkit.runtime.host.host import Gpu
from patchkit.runtime.host.machine_root import Reader, ToolUnavailable, printable, run, whole

_QUERY = "name,compute_cap,driver_version,memory.total,pci.bus_id"
_PATIENCE = 10.0  # seconds: without the persistence daemon nvidia-smi first wakes the driver
_CAPABILITY = re.compile(r"\d+\.\d+")


def gpus(reader: Reader) -> tuple[Gpu, ...]:
    """Return the GPUs; none, and a note, if no source names any."""
    command = ("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")
    # NVML first: a library call, where nvidia-smi is a process to start.
    tools: tuple[tuple[str, str, Callable[[], str]], ...] = (
        ("NVML", "nvml.csv", _ask_nvml),
        ("nvidia-smi", "nvidia-smi.csv", lambda: run(command, _PATIENCE)),
    )
    unavailable = []
    for tool, name, ask in tools:
        try:
            return _parse_gpus(reader.answer(name, ask), tool)
        except ToolUnavailable as words:
            unavailable.append(str(words))
    reader.note(f"no GPU is found: {'; '.join(unavailable)}")
    return ()


def _ask_nvml() -> str:
    from patchkit.runtime.host import nvml  # ctypes, only on the machine itself

    return nvml.ask()


def _parse_gpus(text: str, who: str) -> tuple[Gpu, ...]:
    """Read lines such as ``NVIDIA GB10, 12.1, 580.173.02, [N/A], 0000000F:01:00.0``.

    Raises ToolUnavailable for other text.
    """
    rows = [list(map(_read_cell, line.split(","))) for line in text.splitlines() if line.strip()]
    if any(len(row) != 5 for row in rows):
        raise ToolUnavailable(f"{who}: what it says is not understood: {printable(text)[:80]!r}")
    if not rows:
        raise ToolUnavailable(f"{who}: has no GPU")
    return tuple(
        Gpu(
            name=name,
            capability=capability if _CAPABILITY.fullmatch(capability) else "",
            driver=driver,
            memory=whole(memory),
            bus=_sysfs_address(bus),
        )
        for name, capability, driver, memory, bus in rows
    )


def _read_cell(cell: str) -> str:
    """Return a cell; "" for ``[N/A]``, ``[Not Supported]``, ``[Unknown Error]`` and the like."""
    text = printable(cell)
    bare = text.strip("[]")
    return "" if text.startswith("[") or bare.lower() in ("n/a", "not supported") else text


def _sysfs_address(text: str) -> str:
    """Return a PCI address as sysfs writes it: ``0000000F:01:00.0`` → ``000f:01:00.0``."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]:0>4}:{rest}" if rest else ""
