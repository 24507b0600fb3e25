"""Ask nvidia-smi for GPUs. A GB10 or a Thor has no memory of its own: those cells have words."""

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

_SECONDS = 10.0  # long, since nvidia-smi loads the driver if no persistence daemon runs
_NO_VALUE = re.compile(r"\[.*|n/a|not supported", re.IGNORECASE)
_NAMES = "name,compute_cap,driver_version,memory.total,pci.bus_id"


def read_gpus(reader: Reader) -> tuple[Gpu, ...]:
    """Return the GPUs. If nvidia-smi names none, return none and add a note to ``reader``."""
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
            # nvidia-smi has 0000000F:01:00.0, and sysfs 000f:01:00.0.
            bus=bus.lower()[-12:],
        )
        gpus.append(gpu)
    return tuple(gpus)


def query_gpus(*options: str) -> str:
    """Return the rows that nvidia-smi prints for these options, as CSV without a header.

    Raises ToolUnavailable if it is missing or fails.
    """
    words = ("nvidia-smi", *options, "--format=csv,noheader,nounits")
    # The locale C has decimal points.
    done = attempt(*words, env={**os.environ, "LC_ALL": "C"}, timeout=_SECONDS)
    if done.trouble:
        raise ToolUnavailable(f"nvidia-smi: {printable(done.trouble)[:200]}")
    return done.output


def parse_rows(text: str, columns: int) -> list[list[str]]:
    """Return the cells of lines such as ``NVIDIA GB10, 12.1, 580.173.02, [N/A], 0000000F:01:00.0``.

    A cell without a value (``[N/A]``, ``Not Supported``, ``[Unknown Error]`` …) becomes "". Raises
    ToolUnavailable if a line has another number of cells than ``columns``, or if there is no line.
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
