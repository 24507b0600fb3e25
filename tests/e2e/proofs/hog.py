"""Take memory at a pace, and keep it: `python3 hog.py KIND MIB_PER_SECOND MIB SECONDS`.

Kinds: ``anonymous``; ``ownerless``, which is in no process's RSS and is freed with the last process
that holds it, as memory of a GB10's GPU; ``cached``, files that are read and written;
``compilers``, children that each take a share beside such files; ``crowd``, one child for each
24 MiB; ``waves``, which are given back and taken again, without an end. The pace 0 is as fast as
it goes. It ends after SECONDS, and what it has goes with it.

It runs on a node, with the standard library alone; a stand-in for vLLM calls ``take``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

CHUNK = 2  # MiB
_DATA = os.urandom(1 << 20) * CHUNK  # nothing that a kernel could merge or compress
_COMPILERS = 6
_LONG = 3600  # seconds
_OF_CROWD = 24  # MiB


def take(kind: str, pace: str, total: str, seconds: str) -> None:
    """Take memory of a kind, keep it for some seconds, and give it back."""
    held = KINDS[kind](float(pace), int(total))
    time.sleep(float(seconds))
    for child in held:
        if isinstance(child, subprocess.Popen):
            child.kill()


def take_anonymous(pace: float, total: int) -> list[object]:
    return [bytearray(_DATA) for _ in paced(pace, total)]


def take_ownerless(pace: float, total: int) -> list[object]:
    memory = os.memfd_create("device")
    for _ in paced(pace, total):
        os.write(memory, _DATA)
    return []  # the descriptor holds it


def fill_cache(pace: float, total: int) -> list[object]:
    """Write files and read them, which stay, and so does what the kernel keeps of them."""
    file = Path(tempfile.mkdtemp(dir="/var/tmp"), "objects")
    with file.open("wb", buffering=0) as output:
        for _ in paced(pace, total):
            output.write(_DATA)
    with file.open("rb", buffering=0) as source:
        while source.read(len(_DATA)):
            pass
    return []


def start_compilers(pace: float, total: int) -> list[object]:
    share = [str(pace / _COMPILERS), str(total // _COMPILERS)]
    children = [_start("anonymous", *share) for _ in range(_COMPILERS)]
    return [*children, _start("cached", str(pace), str(min(total, 600)))]


def start_crowd(pace: float, total: int) -> list[object]:
    """Fork a child for each share; they outlive this process, and end with its control group."""
    for number, _ in enumerate(paced(pace, total)):
        if number % (_OF_CROWD // CHUNK) == 0 and os.fork() == 0:
            held = take_anonymous(0, _OF_CROWD)
            time.sleep(_LONG)
            os._exit(len(held))
    return []


def make_waves(pace: float, total: int) -> list[object]:
    while True:
        take_anonymous(pace, total)


def paced(pace: float, total: int) -> Iterator[None]:
    """Yield once for each chunk, not faster than ``pace``."""
    began = time.monotonic()
    for done in range(0, total, CHUNK):
        if pace:
            time.sleep(max(0.0, began + done / pace - time.monotonic()))
        yield


def _start(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, *words, str(_LONG)])


KINDS: dict[str, Callable[[float, int], list[object]]] = {
    "anonymous": take_anonymous,
    "ownerless": take_ownerless,
    "cached": fill_cache,
    "compilers": start_compilers,
    "crowd": start_crowd,
    "waves": make_waves,
}


if __name__ == "__main__":
    take(*sys.argv[1:])
