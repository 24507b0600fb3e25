"""Try a node's GPU step by step, each in a process of its own. Runs on the node."""

import json
import os
import re
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Literal

from patchkit.doctor import gpu_script as script
from patchkit.follow import Completed, Follow, FollowLimits
from patchkit.foreign import read_json
from patchkit.frozen import Fields, Texts, Values, frozen

_FIRST = "cuda"  # the script's step that tries the device; the others need it
_MOST_LINES = 2000  # the last lines of a process, which are kept
_LONGEST = 1000  # characters of a line
# Seconds after its own limit at which a step is killed: it may hang in the kernel.
_GRACE = 10.0
# The line of a traceback that names the error; torch puts the rank before it.
_ERROR = re.compile(
    r"(?:\[rank\d+\]: )?((?:\w+\.)*\w+(?:Error|Exception|Interrupt)(?:: .*)?)$"
)
# How vLLM 0.25.1 to 0.34.0 logs the kernel that it chose.
_CHOSE = re.compile(r"(?:Selected|Using) '?(?:(\w+Kernel) for|(\w+)'? \w+ MoE backend)")


@frozen
class GpuStep:
    """The result of a step: ``figures`` are its measurements, ``kernel`` the kernel that ran.

    If the script names no kernel, ``kernel`` has those that vLLM chose by its log.
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
    steps: Sequence[Fields],
    variables: Values,
) -> Iterator[GpuStep]:
    """Yield the result of each step as soon as the step ends.

    Each of the ``steps`` has settings: its name ``step``, its limit ``seconds``, the name
    ``script`` that the script knows it by, and ``variables`` to be set, if any. If the step that
    tries the device is not ok, the steps after it are "not-run".
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
    settings: Fields,
    variables: Values,
) -> GpuStep:
    """Run a step in a process of its own, and return its result.

    A process that fails, takes too long or does not start gives a result with the state "failed".
    """
    env = {
        **os.environ,
        **variables,
        **settings.get("variables", {}),
        "PYTHONUNBUFFERED": "1",
    }
    limit = settings["seconds"]

    start = time.monotonic()
    step = Follow(
        python,
        script.__file__,
        settings["script"],
        json.dumps(settings),
        env=env,
        limits=FollowLimits(seconds=limit + _GRACE),
    )
    with step as running:
        texts = (line.strip("\n") for line in running)
        lines = deque(filter(None, texts), maxlen=_MOST_LINES)

    seconds = round(time.monotonic() - start, 2)

    answers = [line for line in lines if line.startswith(script.MARK)]
    output = [line[:_LONGEST] for line in lines if line not in answers]
    try:
        fields = read_json("".join(answers[-1:]).removeprefix(script.MARK))
    except ValueError:
        reason = _missing_answer(step.done, output)
        if seconds >= limit:
            reason = f"no answer within {limit:g} s"
        fields = {"state": "failed", "reason": reason}

    choices = _CHOSE.finditer("\n".join(output))
    kernels = dict.fromkeys(choice[1] or choice[2] for choice in choices)
    fields.setdefault("kernel", ", ".join(kernels))
    return GpuStep(
        step=settings["step"],
        seconds=seconds,
        lines=tuple(output),
        **fields,
    )


def _missing_answer(done: Completed, output: Sequence[str]) -> str:
    """Return why a process gave no answer: the error that it printed, or its last line."""
    if not done.started:
        return f"{done.command[0]} {done.trouble}"

    ended = done.trouble.partition(":")[0] or "it ended without an answer"

    errors = [match[1] for match in map(_ERROR.match, output) if match]
    shown = [line.strip() for line in output if line.strip()]
    return f"{ended}: {(errors or shown or ['it printed nothing'])[-1]}"
