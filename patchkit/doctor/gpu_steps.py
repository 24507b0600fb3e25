"""Try a node's GPU step by step, each in a process of its own. Runs on the node."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

from patchkit.doctor import gpu_script as script
from patchkit.follow import Completed, Follow
from patchkit.foreign import read_json
from patchkit.frozen import Fields, Texts, Values, frozen

RANK = "all-reduce"
"""The step in which all nodes run together, one rank on each."""

_FIRST = "cuda"  # the script's step that tries the device; the others need it
_MOST_LINES = 2000  # the last lines of a process, which are kept
_LONGEST = 1000  # characters of a line
_FIELDS = {"state", "kernel", "reason", "figures"}  # of the script's answer
# Seconds after its own limit at which a step is killed: it may hang in the kernel.
_GRACE = 10.0
# The line of a traceback that names the error; torch puts the rank before it.
_ERROR = re.compile(
    r"(?:\[rank\d+\]: )?((?:\w+\.)*\w+(?:Error|Exception|Interrupt)(?:: .*)?)$"
)


@frozen
class GpuStep:
    """The result of a step: ``figures`` are its measurements, ``kernel`` the kernel that ran.

    ``reason`` says why the step failed or was not run. ``lines`` are the last lines that the
    step printed.
    """

    step: str
    state: Literal["ok", "failed", "not-run"]
    seconds: float = 0.0
    kernel: str = ""
    reason: str = ""
    figures: Mapping[str, str | float | int] = field(default_factory=dict)
    lines: Texts = ()


def gpu_steps(
    python: str,
    steps: Sequence[Mapping[str, Any]],
    variables: Values,
) -> Iterator[GpuStep]:
    """Yield the result of each step as soon as the step ends.

    Each of the ``steps`` has settings: its name ``step``, its limit ``seconds``, the name
    ``script`` that the script knows it by. If the step that tries the device is not ok, the steps
    after it are "not-run".
    """
    obstacle = ""
    for settings in steps:
        if obstacle:
            result = GpuStep(
                step=settings["step"],
                state="not-run",
                reason=obstacle,
            )
        else:
            result = run_step(python, settings, variables)

        if settings["script"] == _FIRST and result.state != "ok":
            obstacle = result.reason
        yield result


def free_port(address: str) -> int:
    """Return a TCP port at an address of this node at which nothing listens."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


def run_step(
    python: str,
    settings: Mapping[str, Any],
    variables: Values,
) -> GpuStep:
    """Run a step in a process of its own, and return its result.

    A process that fails, takes too long or does not start gives a result with the state "failed".
    """

    env = {
        **os.environ,
        **variables,
        "PYTHONUNBUFFERED": "1",
    }

    limit = float(settings["seconds"])
    lines = deque[str](maxlen=_MOST_LINES)
    done = None

    start = time.monotonic()
    step = Follow(
        python,
        script.__file__,
        str(settings["script"]),
        json.dumps(dict(settings)),
        env=env,
    )
    with step as running:
        for line in running:
            if text := line.strip("\n"):
                lines.append(text)
            if time.monotonic() - start >= limit + _GRACE:
                break
        else:
            done = running.done

    seconds = round(time.monotonic() - start, 2)

    answers = [line for line in lines if line.startswith(script.MARK)]
    output = [line[:_LONGEST] for line in lines if line not in answers]
    answer = answers[-1].removeprefix(script.MARK) if answers else ""
    fields = _read_answer(answer)

    if fields is None:
        reason = _missing_answer(done, output)
        if seconds >= limit:
            reason = f"no answer within {limit:g} s"
        fields = {"state": "failed", "reason": reason}

    return GpuStep(
        step=str(settings["step"]),
        seconds=seconds,
        lines=tuple(output),
        **fields,
    )


def _read_answer(answer: str) -> Fields | None:
    """Return the fields of a script's answer, None if the text is not such an answer."""
    try:
        fields = read_json(answer)
        return {key: fields[key] for key in _FIELDS & fields.keys()}
    except (ValueError, AttributeError):
        return None


def _missing_answer(done: Completed | None, output: Sequence[str]) -> str:
    """Return why a process gave no answer: the error that it printed, or its last line."""
    if done is None:
        return "it did not end"

    if not done.started:
        return f"{done.command[0]} {done.trouble}"

    ended = done.trouble.partition(":")[0] or "it ended without an answer"

    last_line = "it printed nothing"
    error = ""
    for line in output:
        last_line = line.strip() or last_line

        if match := _ERROR.match(line):
            error = match[1]

    return f"{ended}: {error or last_line}"
