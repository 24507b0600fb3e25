"""Ask nvidia-smi for GPUs; that a GB10 or a Thor has no memory of its own it says variously."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from patchkit.process import attempt
from patchkit.runtime.host.host import Gpu
from patchkit.runtime.host.machine_root import Reader, ToolUnavailable, printable, whole

_SECONDS = 10.0  # without the persistence daemon nvidia-smi first wakes the driver
_NAMES = "name,compute_cap,driver_version,memory.total,pci.bus_id"
_STATE = (
    "temperature.gpu,power.draw,enforced.power.limit,clocks.sm,clocks.max.sm,utilization.gpu,"
    "clocks_throttle_reasons.active"
)


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


def gpus(reader: Reader) -> tuple[Gpu, ...]:
    """Return the GPUs; none, and a note, if nvidia-smi names none."""
    try:
        text = reader.answer("nvidia-smi.csv", lambda: _query(f"--query-gpu={_NAMES}"))
        return tuple(
            Gpu(
                name=name,
                capability=capability if re.fullmatch(r"\d+\.\d+", capability) else "",
                driver=driver,
                memory=whole(memory),
                # 0000000F:01:00.0, and sysfs has 000f:01:00.0.
                bus=bus.lower()[-12:],
            )
            for name, capability, driver, memory, bus in _parse_rows(text, 5)
        )
    except ToolUnavailable as words:
        reader.notes.append(f"no GPU is found: {words}")
        return ()


def gpu_state() -> GpuState:
    """Return how the first GPU is. Raises ToolUnavailable."""
    (state, *_others) = _parse_rows(_query(f"--query-gpu={_STATE}", "--id=0"), 7)
    celsius, *powers, mhz, most_mhz, busy, throttled = state
    watts = [float(cell) if re.fullmatch(r"\d{1,9}(\.\d+)?", cell) else None for cell in powers]
    try:
        text = _query("--query-compute-apps=pid,used_memory", "--id=0")
        rows = _parse_rows(text, 2) if text.strip() else []
        processes = tuple(GpuProcess(int(pid), whole(mib)) for pid, mib in rows if pid.isdecimal())
    except ToolUnavailable:
        processes = None
    return GpuState(
        celsius=whole(celsius),
        watts=watts[0],
        limit=watts[1],
        mhz=whole(mhz),
        most_mhz=whole(most_mhz),
        busy=whole(busy),
        throttled=int(throttled, 16) if re.fullmatch("0x[0-9a-fA-F]+", throttled) else None,
        processes=processes,
    )


def _query(*options: str) -> str:
    words = ("nvidia-smi", *options, "--format=csv,noheader,nounits")
    # Decimal points depend on the locale.
    done = attempt(*words, env={**os.environ, "LC_ALL": "C"}, timeout=_SECONDS)
    if done.trouble:
        raise ToolUnavailable(f"nvidia-smi: {printable(done.trouble)[:200]}")
    return done.output


def _parse_rows(text: str, columns: int) -> list[list[str]]:
    """Read lines such as ``NVIDIA GB10, 12.1, 580.173.02, [N/A], 0000000F:01:00.0``.

    A cell that says ``[N/A]``, ``Not Supported``, ``[Unknown Error]`` or the like is "". Raises
    ToolUnavailable for other text.
    """
    rows = []
    for line in filter(str.strip, text.splitlines()):
        cells = [printable(cell) for cell in line.split(",")]
        bare = re.compile(r"\[.*|n/a|not supported", re.IGNORECASE)
        rows.append(["" if bare.fullmatch(cell) else cell for cell in cells])
    if any(len(row) != columns for row in rows):
        raise ToolUnavailable(
            f"nvidia-smi: what it says is not understood: {printable(text)[:80]!r}"
        )
    if not rows:
        raise ToolUnavailable("nvidia-smi: has no GPU")
    return rows
