"""Run patchkit in a fork of a process that has imported all of it: a start takes no 0.3 seconds.

What it reads, writes, says and ends with is that of a process of its own. Who tests how a process
starts, or is ended, starts one.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# Read by the interpreter itself, when it starts.
_STARTING = ("PYTHON", "LC_", "LANG")
_PROGRAM = """\
import atexit, gc, importlib, json, os, pkgutil, runpy, sys, threading, time, traceback
import patchkit
for each in pkgutil.walk_packages(patchkit.__path__, "patchkit.", onerror=str):
    if not each.name.endswith(".__main__") and ".torch_stand_in" not in each.name:
        try:
            importlib.import_module(each.name)
        except Exception:
            pass  # whoever needs it says why it cannot be imported
gc.freeze()
for line in sys.stdin.buffer:
    asked = json.loads(line)
    pid = os.fork()
    if not pid:
        break
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(1, b"%d\\n" % status)
else:
    os._exit(0)
os.environ.clear()
os.environ.update(asked["env"])
time.tzset()
os.umask(asked["umask"])
for number, path in enumerate(("/dev/null", asked["stdout"], asked["stderr"])):
    os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
os.closerange(3, 256)
sys.stdin = open(0)
os.chdir(asked["cwd"])
sys.argv = ["patchkit", *asked["words"]]
status = 0
try:
    runpy.run_module("patchkit", run_name="__main__", alter_sys=True)
except SystemExit as end:
    status = end.code if isinstance(end.code, int) else int(end.code is not None)
except BaseException:
    traceback.print_exc()
    status = 1
threading._shutdown()
atexit._run_exitfuncs()
try:
    sys.stdout.flush()
finally:
    sys.stderr.flush()
    os._exit(status)  # taking all modules down takes longer than most commands
"""


class ReadyPatchkit:
    """Starts `python -m patchkit …` quickly, one at a time."""

    def __init__(self, env):
        self.env, self.busy = env, False
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env,
        )  # fmt: skip

    def run(self, words, *, cwd, env):
        """Run it to its end: what `subprocess.run` returns of it, as text."""
        command = [sys.executable, "-m", "patchkit", *words]
        changed = {
            name for name in {*env, *self.env} if env.get(name) != self.env.get(name)
        }
        if self.busy or any(name.startswith(_STARTING) for name in changed):
            return subprocess.run(
                command, cwd=cwd, env=env, capture_output=True, text=True
            )
        self.busy = True
        try:
            with tempfile.TemporaryDirectory() as folder:
                said = {name: Path(folder, name) for name in ("stdout", "stderr")}
                for path in said.values():
                    path.touch()
                umask = os.umask(0)
                os.umask(umask)
                asked = {"cwd": cwd, "env": env, "words": words, "umask": umask, **said}
                self.process.stdin.write(
                    json.dumps(asked, default=str).encode() + b"\n"
                )
                self.process.stdin.flush()
                status = int(self.process.stdout.readline())
                texts = [path.read_text() for path in said.values()]
                return subprocess.CompletedProcess(command, status, *texts)
        finally:
            self.busy = False

    def end(self):
        with self.process:  # closes both pipes
            self.process.stdin.close()
