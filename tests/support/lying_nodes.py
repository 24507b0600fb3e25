"""An ``ssh`` whose nodes lie, hang or talk without an end; what is not a lie runs on this machine.

``lies`` is by node and by the function that is asked for, ``*`` for any: the text that the node
writes, and what it does then: ``end``, ``hang``, ``repeat`` it for ever, or ``run`` the function.
"""

import contextlib
import json
import sys

from support import write_files

MARK = "patchkit: "
PROGRAM = """\
import json, os, subprocess, sys, threading
if "-G" in sys.argv:
    sys.exit()
lies = json.load(open({file!r})).get(sys.argv[sys.argv.index("--") + 1], {{}})
stdin = sys.stdin.buffer
first = stdin.readline()
sizes = stdin.readline()
archive, request = map(stdin.read, json.loads(sizes))
_module, function, arguments = json.loads(request)
text, then = lies.get(function) or lies.get("*") or ["", "run"]
said = text.encode("utf-8", "surrogatepass")
with open({file!r} + ".asked", "a") as asked:
    asked.write(json.dumps([sys.argv[sys.argv.index("--") + 1], function, arguments]) + "\\n")
os.write(1, said[:1000]) if then == "hang" else sys.stdout.buffer.write(said)
sys.stdout.flush()
while then == "repeat":
    sys.stdout.buffer.write(said)
while then == "hang" and os.read(0, 4096):
    pass
if then == "hang":
    with open({file!r} + ".asked", "a") as asked:
        ended = [sys.argv[sys.argv.index("--") + 1], "end of " + function, arguments]
        asked.write(json.dumps(ended) + "\\n")
if then == "run":
    words = [{python!r}, "-I", "-c", "import sys;exec(sys.stdin.buffer.readline())"]
    child = subprocess.Popen(words, stdin=subprocess.PIPE)
    child.stdin.write(first + sizes + archive + request)
    child.stdin.flush()
    def forward():
        while read := os.read(0, 4096):
            os.write(child.stdin.fileno(), read)
        child.stdin.close()
    threading.Thread(target=forward, daemon=True).start()
    sys.exit(child.wait())
"""


def value(said):
    """Return the line of an answer."""
    return f"{MARK}{json.dumps({'value': said})}\n"


def parts(*said):
    """Return the lines of a stream's answers, and of its end."""
    lines = [f"{MARK}{json.dumps({'part': each})}\n" for each in said]
    return "".join([*lines, value(None)])


class LyingNodes:
    """What is asked of nodes, and what they answer; ``folder`` is the first one of PATH."""

    def __init__(self, folder):
        self.file = folder / "lies.json"
        program = PROGRAM.format(file=str(self.file), python=sys.executable)
        write_files(folder, {"ssh": f"#!{sys.executable} -SE\n{program}"}, mode=0o755)
        self.lie({})

    def lie(self, lies):
        """Let nodes lie from now on."""
        self.file.write_text(json.dumps(lies))

    def asked(self, function):
        """Return the arguments of each call of a function, with the node's name."""
        return [
            (node, arguments)
            for node, name, arguments in self.calls()
            if name == function
        ]

    def calls(self):
        """Return node, function and arguments of all calls, and of the ends of those that hung."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.file.parent / "lies.json.asked").read_text().splitlines()
            return [json.loads(line) for line in lines]
        return []
