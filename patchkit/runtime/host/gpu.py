"""Ask nvidia-smi for GPUs; it has several words for a GB10 or a Thor without memory of its own."""

from __future__ import annotations

import os
import re

from patchkit.process import attempt
from patchkit.runtime.host.host import Gpu
from patchkit.runtime.host.machine_root import (
    Reader,
    ToolUnavailable,
    parse_whole,
    printable,
)

_SECONDS = 10.0  # without the persistence daemon nvidia-smi first wakes the driver
_NO_VALUE = re.compile(r"\[.*|n/a|not supported", re.IGNORECASE)
_NAMES = "name,compute_cap,driver_version,memory.total,pci.bus_id"


def read_gpus(reader: Reader) -> tuple[Gpu, ...]:
    """Return the GPUs; none, and a note, if nvidia-smi names none."""
    query = f"--query-gpu={_NAMES}"
    try:
        text = reader.answer("nvidia-smi.csv", lambda: query_gpus(query))
        rows = parse_rows(text, 5)
    except ToolUnavailable as error:
        reader.notes.append(f"no GPU is found: {error}")
        return ()

    gpus = []
    for name, capability, driver, memory, bus in rows:
        is_number = re.fullmatch(r"\d+\.\d+", capability)
        gpu = Gpu(
            name=name,
            capability=capability if is_number else "",
            driver=driver,
            memory=parse_whole(memory),
            # 0000000F:01:00.0, and sysfs has 000f:01:00.0.
            bus=bus.lower()[-12:],
        )
        gpus.append(gpu)
    return tuple(gpus)


def query_gpus(*options: str) -> str:
    """Return the rows that nvidia-smi prints. Raises ToolUnavailable."""
    words = ("nvidia-smi", *options, "--format=csv,noheader,nounits")
    # Decimal points depend on the locale.
    done = attempt(*words, env={**os.environ, "LC_ALL": "C"}, timeout=_SECONDS)
    if done.trouble:
        raise ToolUnavailable(f"nvidia-smi: {printable(done.trouble)[:200]}")
    return done.output


def parse_rows(text: str, columns: int) -> list[list[str]]:
    """Read lines such as ``NVIDIA GB10, 12.1, 580.173.02, [N/A], 0000000F:01:00.0``.

    A cell that says ``[N/A]``, ``Not Supported``, ``[Unknown Error]`` or the like is "". Raises
    ToolUnavailable for other text.
    """
    rows = []
    for line in filter(str.strip, text.splitlines()):
        cells = [printable(cell) for cell in line.split(",")]
        if len(cells) != columns:
            shown = printable(text)[:80]
            raise ToolUnavailable(
                f"nvidia-smi: what it says is not understood: {shown!r}"
            )

        rows.append(["" if _NO_VALUE.fullmatch(cell) else cell for cell in cells])
    if not rows:
        raise ToolUnavailable("nvidia-smi: has no GPU")
    return rows
