"""Begin a pod of a group: hold it back after too many starts, and wait for its leader's name.

    pod.py STARTS SECONDS

This is the pods' init container: copied into the manifest, with the standard library. Kubernetes
starts a group again without end and without delay, and its own back-off begins anew with each new
pod; on a Spark every start leaves memory behind. So at most STARTS pods an hour begin on a node,
SECONDS apart. A worker whose leader has no pod yet finds no name for it, and would end the group.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

_HOUR = 3600.0
_AGAIN = 2.0  # seconds between two tries to find the leader's name


def main() -> None:
    """Do both; the arguments are how many starts an hour, and the seconds between two."""
    starts, pause = int(sys.argv[1]), float(sys.argv[2])
    file = Path(os.environ["PATCHKIT_CACHE"], "starts")
    try:
        words = file.read_text(encoding="utf-8", errors="replace").split() if file.exists() else []
        former = sorted(float(each) for each in words if each.isdigit())
        if (seconds := to_wait(former, time.time(), starts, pause)) > 0:
            say(f"started {len(former)} times within an hour: waiting for {seconds:.0f} s")
            time.sleep(seconds)
        written = file.with_name("starts.new")
        kept = [*former, time.time()][-starts:]
        written.write_text("".join(f"{each:.0f}\n" for each in kept), encoding="utf-8")
        written.replace(file)
    except OSError as error:
        say(f"{error}; is {file.parent} on this node the folder of user {os.getuid()}?")
        time.sleep(pause)  # the group is started again at once
        sys.exit(1)
    leader = os.environ["LWS_LEADER_ADDRESS"] if os.environ["LWS_WORKER_INDEX"] != "0" else ""
    told = False
    while leader:
        try:
            socket.getaddrinfo(leader, None)
        except OSError as error:
            if not told:
                say(f"waiting for {leader}: {error}")
                told = True
            time.sleep(_AGAIN)
        else:
            return


def to_wait(former: list[float], now: float, starts: int, pause: float) -> float:
    """Return the seconds until the next start, by the times of the former ones, oldest first."""
    # A time in the future is that of a clock which was set back since: it says nothing.
    last = [each for each in former if now - _HOUR < each <= now]
    until = [last[-1] + pause] if last else []
    if len(last) >= starts:
        until.append(last[-starts] + _HOUR)
    return max((0.0, *(each - now for each in until)))


def say(text: str) -> None:
    """Write a line to the pod's log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
