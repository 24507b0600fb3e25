"""Kill a child process before each single change that it makes to the disk, in turn.

CPython announces every one of them as an audit event.
"""

import gc
import itertools
import os
import signal
import sys
import traceback

from patchkit.errors import PatchkitError

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
EVENTS = {
    "os.chmod",
    "os.link",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.truncate",
}


def in_child(action, hook=None):
    """Run in a process of its own. Its exit code (a PatchkitError's, or 0), or minus its signal."""
    pid = os.fork()
    if pid == 0:
        gc.disable()  # it would copy the memory of the whole test run
        code = 1
        try:
            if hook:
                sys.addaudithook(hook)
            action()
            code = 0
        except PatchkitError as error:
            code = error.exit_code
        finally:
            if code == 1:
                traceback.print_exc()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killer(number):
    """An audit hook that kills the process before its n-th change of the disk.

    A file that is opened to be written counts twice: before it, and when it is there but empty.
    """
    changes = itertools.count(1)

    def hook(event, arguments):
        opens = event == "open" and arguments[2] & WRITES
        if (opens or event in EVENTS) and next(changes) == number:
            kill()
        if opens and next(changes) == number:
            sys.setprofile(lambda _frame, what, _argument: what == "c_call" and kill())

    return hook


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def killed_everywhere(action, prepare):
    """Yield after each kill, before every change, until the action gets through."""
    for number in itertools.count(1):
        prepare()
        code = in_child(action, killer(number))
        if code == 0:
            return
        assert code == -signal.SIGKILL
        yield number
