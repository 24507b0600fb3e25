"""Call a function on a node and write down what it answers: runs there, in the sent package."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from patchkit.cluster.ssh.ssh import error_fields
from patchkit.durable.signals import Interrupted, raise_interrupts
from patchkit.errors import HostError, PatchkitError

HEARTBEAT = 5.0
"""Seconds between two signs of life, of a node as of who asks it."""

LEASE = 60.0
"""Seconds of an asker's silence after which a node ends what it does for it, locks included."""


def answer(request: list[Any], mark: str) -> None:
    """Call what ``request`` names, ``[MODULE, FUNCTION, ARGUMENTS]``; an answer is a marked line.

    A generator's values are sent as they come, signs of life between them. The call ends when
    standard input does, or is silent: then nobody waits for the answer any more.
    """
    module, function, arguments = request
    raise_interrupts()
    writing = threading.Lock()

    def send(kind: str, value: object) -> None:
        line = f"{mark}{json.dumps({kind: value})}\n".encode()
        with writing:
            # Not sys.stdout, whose lock a thread would hold when Python ends.
            while line:
                line = line[os.write(1, line) :]

    threading.Thread(target=_leave_with_the_asker, daemon=True).start()
    threading.Thread(target=_show_life, args=[send], daemon=True).start()
    try:
        value = getattr(importlib.import_module(module), function)(**arguments)
        if inspect.isgenerator(value):
            for each in value:
                send("part", each)
            value = None
        send("value", value)
    except PatchkitError as error:
        send("error", error_fields(error))
    except (BrokenPipeError, Interrupted):
        return  # nobody reads on
    except OSError as error:
        what = f"{error.filename or 'a file'}: {error.strerror or error}"
        hint = "check permissions and free space there"
        send("error", error_fields(HostError(what, hint=hint)))
    except Exception as error:  # noqa: BLE001 - a traceback there would reach nobody
        what = f"{function}: {type(error).__name__}: {error}"
        send("error", error_fields(HostError(what, hint="report it, with what was asked")))


def _show_life(send: Callable[[str, object], None]) -> None:
    with contextlib.suppress(OSError):  # nobody reads on
        while True:
            send("alive", True)
            time.sleep(HEARTBEAT)


def _leave_with_the_asker() -> None:
    # A machine that sleeps, or that has lost its network, ends nothing by itself.
    while select.select([0], [], [], LEASE)[0] and os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
