"""Call a function on a node and write down what it answers: runs there, in the sent package."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import signal
import sys
import threading
from typing import Any

from patchkit.durable.signals import Interrupted, raise_interrupts
from patchkit.errors import HostError, PatchkitError
from patchkit.runtime.remote.failure import error_fields


def answer(request: list[Any], mark: str) -> None:
    """Call what ``request`` names, ``[MODULE, FUNCTION, ARGUMENTS]``; an answer is a marked line.

    A generator's values are sent as they come. The call ends when standard input does: then nobody
    waits for the answer any more.
    """
    module, function, arguments = request
    raise_interrupts()
    threading.Thread(target=_leave_with_the_asker, daemon=True).start()

    def send(kind: str, value: object) -> None:
        sys.stdout.write(f"{mark}{json.dumps({kind: value})}\n")
        sys.stdout.flush()

    try:
        value = getattr(importlib.import_module(module), function)(**arguments)
        if inspect.isgenerator(value):
            for each in value:
                send("part", each)
            value = None
        send("value", value)
    except PatchkitError as error:
        send("error", error_fields(error))
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - nobody reads the old one
    except OSError as error:
        what = f"{error.filename or 'a file'}: {error.strerror or error}"
        hint = "check permissions and free space there"
        send("error", error_fields(HostError(what, hint=hint)))
    except Exception as error:  # noqa: BLE001 - a traceback there would reach nobody
        what = f"{function}: {type(error).__name__}: {error}"
        send("error", error_fields(HostError(what, hint="report it, with what was asked")))
    except Interrupted:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - nobody reads the old one


def _leave_with_the_asker() -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock would be held when Python ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)
