"""Try a node's GPU step by step, each in a process of its own. Runs on the node."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from patchkit.doctor import gpu_script as script
from patchkit.follow import Follow
from patchkit.foreign import read_json

RANK = "all-reduce"  # the step of a rank of all nodes together
_FIRST = "cuda"  # the script's step without which no other is tried
_MOST, _LONGEST = 2000, 1000  # lines of a process that are kept, characters of each
_FIELDS = {"state", "kernel", "reason", "figures"}  # of an answer
_GRACE = 10.0  # seconds past its own limit, after which a step that hangs in the kernel is killed
# The line of a traceback that says what it was; torch puts the rank before it.
_ERROR = re.compile(
    r"(?:\[rank\d+\]: )?((?:\w+\.)*\w+(?:Error|Exception|Interrupt)(?:: .*)?)$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStep:
    """How a step went: ``figures`` are what it measured, ``kernel`` what was taken.

    ``reason`` says why it failed or was not run; ``lines`` are the last that it printed.
    """

    step: str
    state: Literal["ok", "failed", "not-run"]
    seconds: float = 0.0
    kernel: str = ""
    reason: str = ""
    figures: Mapping[str, str | float | int] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


def gpu_steps(
    python: str, steps: Sequence[Mapping[str, Any]], variables: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield each step's result as JSON takes it, as soon as it is there.

    ``steps`` are settings with ``step``, ``seconds`` and ``script``, the name in the script, which
    may be another ``file``. If the first one, of the device, is not ok, the others are not tried.
    """
    obstacle = ""
    for each in steps:
        if obstacle:
            found = GpuStep(step=each["step"], state="not-run", reason=obstacle)
        else:
            found = run_step(python, each, variables)
        if each["script"] == _FIRST and found.state != "ok":
            obstacle = found.reason
        yield asdict(found)


def free_port(address: str) -> int:
    """Return a port at an address of this node that nothing listens at."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


def run_step(
    python: str, settings: Mapping[str, Any], variables: Mapping[str, str]
) -> GpuStep:
    """Run a step; whatever happens to its process is a result."""
    file = str(settings.get("file", script.__file__))
    words = (python, file, str(settings["script"]), json.dumps(dict(settings)))
    env = {**os.environ, **variables, "PYTHONUNBUFFERED": "1"}
    limit, lines = float(settings["seconds"]), deque[str](maxlen=_MOST)
    start, done = time.monotonic(), None
    with Follow(*words, env=env) as running:
        for line in running:
            if text := line.strip("\n"):
                lines.append(text)
            if time.monotonic() - start >= limit + _GRACE:
                break
        else:
            done = running.done
    seconds = round(time.monotonic() - start, 2)
    answers = [line for line in lines if line.startswith(script.MARK)]
    said = [line[:_LONGEST] for line in lines if line not in answers]
    late = f"no answer within {limit:g} s" if seconds >= limit else ""
    try:
        answer = read_json(answers[-1].removeprefix(script.MARK))
        fields = {key: answer[key] for key in _FIELDS & answer.keys()}
    except (ValueError, IndexError, AttributeError):  # none, or none of ours
        reason = "it did not end"
        if late:
            reason = late
        elif done and not done.started:
            reason = f"{done.command[0]} {done.trouble}"
        elif done:
            errors = [found[1] for line in said if (found := _ERROR.match(line))]
            last = [line.strip() for line in said if line.strip()] or [
                "it printed nothing"
            ]
            ended = done.trouble.partition(":")[0] or "it ended without an answer"
            reason = f"{ended}: {(errors or last)[-1]}"
        fields = {"state": "failed", "reason": reason}
    return GpuStep(
        step=str(settings["step"]), seconds=seconds, lines=tuple(said), **fields
    )
