"""Talk to a program that answers by lines as long as somebody listens, within limits."""

from __future__ import annotations

import contextlib
import math
import os
import select
import subprocess
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from patchkit.process import RUNNING, Completed, completed, decoded, not_started
from patchkit.units import BYTES_PER_MIB

_ERRORS = 1 << 16  # bytes of a program's errors that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class DialogueLimits:
    """When a dialogue is given up: after seconds of silence, or in all; bytes of a line, or in all.

    Lines without ``mark`` are no sign of life and are not yielded, those with it from behind it.
    Each ``beat`` seconds the program is sent a line feed, so that it can tell who listens.
    """

    mark: str = ""
    silence: float = math.inf
    seconds: float = math.inf
    line: int = 16 << 20
    size: float = math.inf
    beat: float = 0.0


def dialogue(
    *words: str | Path, given: bytes, limits: DialogueLimits = DialogueLimits()
) -> Generator[str, None, Completed]:
    """Yield the lines that a program answers to what it is given; return how it ended.

    Its standard input stays open behind ``given``: when it ends, the program can tell that nobody
    listens any more. That is so when the generator is closed, and when this process is killed.
    A program that goes over a limit is killed: its status is None then.
    """
    command = tuple(map(str, words))
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)
    except (OSError, ValueError) as error:
        return not_started(command, None, error)
    RUNNING.add(process)
    over, errors, given_up = threading.Event(), bytearray(), ""
    # A thread: a program that does not read must not keep this one from its limits.
    feeder = threading.Thread(target=_feed, args=(process, given, limits.beat, over), daemon=True)
    reader = _DialogueReader(process, limits)
    try:
        feeder.start()
        for line in reader.lines(errors):
            if limits.mark in line:
                yield line.partition(limits.mark)[2] if limits.mark else line
                reader.heard = time.monotonic()
        if given_up := reader.given_up:
            process.kill()
    finally:
        RUNNING.discard(process)
        over.set()
        feeder.join(1)
        if feeder.is_alive():
            process.kill()  # it does not read
        _hang_up(process)
        with cast("IO[bytes]", process.stderr) as rest:
            os.set_blocking(rest.fileno(), False)  # ssh's master in the background keeps it open
            errors += rest.read(_ERRORS) or b""
    said = decoded(bytes(errors[-_ERRORS:]))
    if given_up:
        return Completed(command=command, status=None, errors=said, trouble=given_up)
    return completed(command, process.wait(), "", said)


def _feed(
    process: subprocess.Popen[bytes], given: bytes, beat: float, over: threading.Event
) -> None:
    """Write what a program is given, then a line feed each ``beat`` seconds until it is over."""
    stdin, view = cast("IO[bytes]", process.stdin), memoryview(given)
    with contextlib.suppress(OSError):  # it ended, and says why on standard error
        while view:
            view = view[stdin.write(view) :]
        while beat and not over.wait(beat):
            stdin.write(b"\n")


class _DialogueReader:
    """Reads a program's lines within limits; ``given_up`` is the one that it broke, "" for none."""

    def __init__(self, process: subprocess.Popen[bytes], limits: DialogueLimits) -> None:
        self.stdout, self.stderr = (cast("IO[bytes]", p) for p in (process.stdout, process.stderr))
        self.limits, self.given_up = limits, ""
        self.began = self.heard = time.monotonic()

    def lines(self, errors: bytearray) -> Iterator[str]:
        """Yield each line, the last one of a program that ended even if it is a part."""
        rest, taken = bytearray(), 0
        for read in self._parts(errors):
            taken += len(read)
            rest += read
            if taken > self.limits.size:
                self.given_up = f"it sent more than {self.limits.size / BYTES_PER_MIB:g} MiB"
                return
            if b"\n" in read:
                *whole, last = bytes(rest).split(b"\n")
                rest = bytearray(last)
                yield from (decoded(line + b"\n") for line in whole)
            elif len(rest) > self.limits.line:
                self.given_up = (
                    f"it sent a line of more than {self.limits.line / BYTES_PER_MIB:g} MiB"
                )
                return
        if rest and not self.given_up:
            yield decoded(bytes(rest))

    def _parts(self, errors: bytearray) -> Iterator[bytes]:
        """Yield what comes until it ends, or for as long as it may take; keep the last errors."""
        ends = [self.stdout, self.stderr]
        while True:
            wait = self._left()
            # Behind its time only an answer counts: errors may come for ever.
            ready = select.select([self.stdout] if wait == 0 else ends, [], [], wait)[0]
            if not ready and self._left() == 0:
                self.given_up = self._late()
                return
            if self.stderr in ready:
                said = os.read(self.stderr.fileno(), 1 << 16)
                errors[:] = (errors + said)[-_ERRORS:]
                ends = ends if said else [self.stdout]
            if self.stdout in ready:
                if not (read := os.read(self.stdout.fileno(), 1 << 16)):
                    return
                yield read

    def _left(self) -> float | None:
        """Return for how many seconds a line may be waited for; None for ever."""
        end = min(self.heard + self.limits.silence, self.began + self.limits.seconds)
        return None if end == math.inf else max(end - time.monotonic(), 0.0)

    def _late(self) -> str:
        if self.heard + self.limits.silence < self.began + self.limits.seconds:
            return f"no sign of life for {self.limits.silence:g} s"
        return f"not done after {self.limits.seconds:g} s"


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    """Close both pipes of a program and wait for its end, for three seconds."""
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()
    try:
        process.wait(3)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
