"""Send patchkit and a request to a node's Python, which calls a function and prints its answer.

Program, package and request go to standard input. The remote command line is always the same, so
no shell on the node has to interpret words of a request.
"""

import contextlib
import importlib
import inspect
import io
import json
import os
import select
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Generator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from patchkit.cluster.ssh.ssh import TOOLS, error_fields
from patchkit.durable.signals import SIGNALS, Interrupted, raise_interrupts
from patchkit.errors import HostError, PatchkitError
from patchkit.frozen import Texts, plain_fields
from patchkit.records import RECIPES, read_toml

HEARTBEAT = 5.0
"""Seconds between two signs of life, in both directions."""

LEASE = 60.0
"""Seconds without input after which a node ends the call and so releases the call's locks."""

T = TypeVar("T")
Steps = Generator[tuple[int, int], None, T]
"""A function on a node that yields its progress, as (DONE, TOTAL), and returns a result."""


def answer(request: list[Any], mark: str) -> None:
    """Call the function of ``request``, ``[MODULE, FUNCTION, ARGUMENTS]``, and print its answer.

    Every printed line begins with ``mark``. The parts of a generator are sent as they come, with
    signs of life between them. The call is ended when standard input ends or is silent for LEASE
    seconds, since nobody waits for the answer then. An error of the function is sent, not raised.
    """
    module, name, arguments = request
    raise_interrupts()
    writing = threading.Lock()

    def send(kind: str, value: object) -> None:
        """Write one marked line; a lock keeps the lines of several threads apart."""
        line = f"{mark}{encoded({kind: value})}\n".encode()
        with writing:
            # Not sys.stdout: a thread could hold its lock when Python ends.
            while line:
                line = line[os.write(1, line) :]

    threading.Thread(target=_leave_with_the_asker, daemon=True).start()
    threading.Thread(target=_show_life, args=[send], daemon=True).start()

    try:
        function = getattr(importlib.import_module(module), name)
        value: Any = function(**arguments)
        if inspect.isgenerator(value):
            value = hand_over(value, partial(send, "part"))
        send("value", value)
    except PatchkitError as error:
        send("error", error_fields(error))
    except (BrokenPipeError, Interrupted):
        return  # nobody waits for the answer
    except OSError as error:
        send("error", error_fields(file_error(error)))
    except Exception as error:  # noqa: BLE001 - a traceback there would reach nobody
        message = f"{name}: {type(error).__name__}: {error}"
        unexpected = HostError(message, hint="report it, with what was asked")
        send("error", error_fields(unexpected))
    finally:
        # The connection ends now; its signal must not stop the removal of this package's folder.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def file_error(error: OSError) -> HostError:
    """Return the error to send for a file that the node cannot read or write."""
    message = f"{error.filename or 'a file'}: {error.strerror or error}"
    return HostError(message, hint="check permissions and free space there")


def hand_over(parts: Generator[Any, Any, Any], take: Callable[[Any], object]) -> Any:
    """Call ``take`` with each part of a generator; return the generator's result."""
    while True:
        try:
            part = next(parts)
        except StopIteration as end:
            return end.value
        take(part)


def encoded(value: object) -> str:
    """Return arguments or an answer as one line of JSON; dataclasses become objects."""
    return json.dumps(value, default=plain_fields)


def _show_life(send: Callable[[str, object], None]) -> None:
    with contextlib.suppress(OSError):  # nobody reads on
        while True:
            send("alive", True)
            time.sleep(HEARTBEAT)


def _leave_with_the_asker() -> None:
    # A caller that sleeps, or has lost its network, does not close the connection.
    while select.select([0], [], [], LEASE)[0] and os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


MARK = "patchkit: "
"""The beginning of each line of an answer, which lines printed by a login shell do not have."""

# These words mean the same in every shell. -I: Python ignores variables and the current folder.
COMMAND = "exec python3 -I -c 'import sys;exec(sys.stdin.buffer.readline())'"

# Any Python 3 can parse this, to say that it is too old. XDG_RUNTIME_DIR is a folder in memory.
_FIRST = """
import contextlib, io, json, os, sys, tempfile, zipfile
if sys.version_info < (3, 11):
    what = "Python %d.%d is too old" % sys.version_info[:2]
    print(MARK + json.dumps({"error": {"kind": "HostError", "what": what,
        "why": "patchkit needs 3.11 or later there", "hint": "sudo apt install python3.11"}}))
    sys.exit()
sizes = json.loads(sys.stdin.buffer.readline())
archive, request = map(sys.stdin.buffer.read, sizes)
place = os.environ.get("XDG_RUNTIME_DIR", "")
place = place if os.access(place, os.W_OK) else None
with contextlib.ExitStack() as stack:
    try:
        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="patchkit-", dir=place))
        zipfile.ZipFile(io.BytesIO(archive)).extractall(home)
    except OSError as error:
        what = "%s: %s" % (place or tempfile.gettempdir(), error.strerror)
        print(MARK + json.dumps({"error": {"kind": "StorageError", "what": what,
            "why": "patchkit unpacks itself there, for the time of a call", "hint": "df -h"}}))
        sys.exit()
    sys.path.insert(0, home)
    sys.dont_write_bytecode = True
    from patchkit.cluster.ssh.answer import answer
    answer(json.loads(request), MARK)
"""


def first_bytes(module: str, function: str, arguments: Mapping[str, Any]) -> bytes:
    """Return the input of a node's Python: a line of code, sizes in bytes, package, request."""
    request = encoded([module, function, arguments]).encode()
    line = f"exec({f'MARK = {MARK!r}{_FIRST}'!r})\n".encode()
    sizes = json.dumps([len(package()), len(request)]).encode()
    return line + sizes + b"\n" + package() + request


_HOME = Path(__file__).resolve().parents[2]  # the package itself
# The first day of zip, so that equal packages have equal bytes.
_WHEN = (1980, 1, 1, 0, 0, 0)


@cache
def package() -> bytes:
    """Return a zip of the files for a node: equal files give equal bytes."""
    sent = read_toml(dict[str, Texts], TOOLS, key="sent")
    files = {f"patchkit/recipes/{name}": RECIPES / name for name in sent["recipes"]}
    for part in sent["package"]:
        for path in _HOME.glob(part):
            files[f"patchkit/{path.relative_to(_HOME)}"] = path

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, path in sorted(files.items()):
            entry = zipfile.ZipInfo(name, _WHEN)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
