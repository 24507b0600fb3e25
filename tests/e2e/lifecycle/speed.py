"""Measure what patchkit adds to ssh and to vLLM, on emulated nodes.

    python -m e2e.lifecycle.speed WORK

All figures are of one run on one machine, whose cores the nodes share; each is beside what it is
measured against.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from e2e.lifecycle import rootfs
from e2e.lifecycle.cluster import MODEL, OTHER_MODEL, EmulatedCluster, LifecycleLab
from e2e.lifecycle.rack import Rack

_RUNS = 5
_PLAIN = ("ssh", "-o", "ControlMaster=no", "-o", "ControlPath=none")
_TIMES = re.compile(r"loaded in (\d+) s, first token after ([\d.]+) s")


def seconds(work: Callable[[], object]) -> float:
    """Return how long something takes."""
    began = time.monotonic()
    work()
    return time.monotonic() - began


def ssh(rack: Rack) -> float:
    """Return the median of a login that does nothing."""
    return median(seconds(lambda: rack.laptop.run(*_PLAIN, "spark1", "true")) for _ in range(_RUNS))


def status(cluster: EmulatedCluster) -> tuple[float, float]:
    """Return the time of `status` with new connections, and the median with those of a call before.

    Connections end 15 s after the last call.
    """
    time.sleep(20)
    first = seconds(lambda: cluster.patchkit("status"))
    return first, median(seconds(lambda: cluster.patchkit("status")) for _ in range(_RUNS))


def added(cluster: EmulatedCluster, model: str) -> float:
    """Return the seconds of `up` beyond those that the server took until its first token."""
    cluster.patchkit("down")
    began = time.monotonic()
    done = cluster.up(model)
    whole = time.monotonic() - began
    found = _TIMES.search(done.output)
    assert found, done.output
    return whole - float(found[1]) - float(found[2])


def main(work: Path) -> None:
    """Print the figures."""
    lab = LifecycleLab(work, rootfs.ready(work))
    with lab.serving("speed") as cluster:
        login, (first, again) = ssh(cluster.rack), status(cluster)
        more = [added(cluster, model) for model in (OTHER_MODEL, MODEL)]
    say(f"a login by ssh alone: {login:.2f} s")
    say(
        f"`status` of two nodes: {first:.2f} s, {first - login:.2f} s beyond a login; "
        f"again at once: {again:.2f} s"
    )
    say(
        f"`up` beyond what the server took: {' and '.join(f'{each:.1f}' for each in more)} s "
        "(the server's own time is rounded to seconds)"
    )
    with lab.serving("speed8", 8) as cluster:
        time.sleep(20)
        one = seconds(lambda: cluster.patchkit("init", "spark1", "--file", "one.toml"))
        time.sleep(20)
        names = list(cluster.rack.nodes)
        options = ("--topology", "socket", "--head-ip", "192.168.177.1", "--file", "eight.toml")
        eight = seconds(lambda: cluster.patchkit("init", *names, *options))
    say(f"`init`: one node {one:.2f} s, eight nodes {eight:.2f} s, on {os.cpu_count()} cores")
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    say(f"load at the end {load}")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
