"""The sandbox of proofs, tried from inside: each right that it takes away, and those it leaves."""

import ctypes
import errno
import fcntl
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from patchkit.errors import HostError, ProofError, StorageError
from patchkit.proof import questions
from patchkit.proof.child_process import Limits, forked, run
from patchkit.proof.sandbox import Box, missing, program_box
from patchkit.proof.upstream_code import Code
from patchkit.source.tree import Sandboxed
from support import write_files

pytestmark = pytest.mark.skipif(missing() != "", reason=f"no sandbox here: {missing()}")
SECRET = "do not tell"
ask = partial(questions.ask, kind=object)


@pytest.fixture
def tree(make_tree, tmp_path, monkeypatch):
    """A tree, with the user's home beside it."""
    write_files(tmp_path / "home/.ssh", {"id_ed25519": SECRET})
    monkeypatch.setenv("HF_TOKEN", SECRET)
    made = make_tree("0.25.1", {"vllm/a.py": "ONE = 1\n", "setup.py": ""})
    return replace(made, sandboxed=Sandboxed.ALWAYS)


def test_a_python_without_ctypes_has_none_and_runs_without():
    code = (
        "import sys; sys.modules['ctypes'] = None; from pathlib import Path\n"
        "from patchkit.proof.child_process import run\n"
        "from patchkit.proof.sandbox import missing\n"
        "ended = run(['/bin/echo', 'ran'], None, folder=Path('/'), environment={})\n"
        "print(missing(), ended.text)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "no ctypes" in done.stdout, done.stderr
    assert "ran" in done.stdout


def _clobber(tree):
    os.close(os.open(tree.root / "vllm/a.py", os.O_RDONLY | os.O_TRUNC))


def _system_call(number):
    assert ctypes.CDLL(None, use_errno=True).syscall(number, 0, 0, 0, 0, 0) >= 0 or (
        ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS)
    ), "denied"


def _fork(_tree):
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


# Each of them works outside, and harms nobody there.
ACTS = {
    "write a new file": lambda tree: (tree.root / "new").write_text("x"),
    "write outside": lambda tree: (tree.root.parent / "new").write_text("x"),
    "empty while reading": _clobber,
    "truncate": lambda tree: os.truncate(tree.root / "vllm/a.py", 8),
    "remove": lambda tree: (tree.root / "setup.py").unlink(),
    "rename": lambda tree: (tree.root / "setup.py").rename(tree.root / "vllm/b.py"),
    "make a folder": lambda tree: (tree.root / "new").mkdir(),
    "make a link": lambda tree: (tree.root / "new").symlink_to("x"),
    "make a hard link": lambda tree: (tree.root / "new").hardlink_to(tree.root / "setup.py"),
    "make a FIFO": lambda tree: os.mkfifo(tree.root / "new"),
    "change a mode": lambda tree: (tree.root / "setup.py").chmod(0o777),
    "change an owner": lambda tree: os.chown(tree.root / "setup.py", os.getuid(), os.getgid()),
    "change a time": lambda tree: os.utime(tree.root / "setup.py", (0, 0)),
    "read a key": lambda tree: (tree.root.parent / "home/.ssh/id_ed25519").read_text(),
    "list the home": lambda tree: [*(tree.root.parent / "home").iterdir()],
    "read /etc": lambda _tree: Path("/etc/passwd").read_text(),
    "read of the parent": lambda _tree: Path(f"/proc/{os.getppid()}/environ").read_text(),
    "run a program": lambda _tree: subprocess.run([sys.executable, "-c", ""], check=True),
    "become a program": lambda _tree: os.execv(sys.executable, [sys.executable, "-c", ""]),
    "fork": _fork,
    "open a socket": lambda _tree: socket.socket().close(),
    "open a local socket": lambda _tree: socket.socket(socket.AF_UNIX).close(),
    "signal the parent": lambda _tree: os.kill(os.getppid(), 0),
    "signal the parent by a file": lambda _tree: fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid()),
    "read the parent's limits": lambda _tree: resource.prlimit(os.getppid(), resource.RLIMIT_CPU),
    "change the parent's priority": lambda _tree: os.setpriority(0, os.getppid(), os.nice(0)),
    "leave the group": lambda _tree: os.setsid(),
    "make a file in memory": lambda _tree: os.memfd_create("x"),
}  # fmt: skip


@pytest.mark.parametrize("act", ACTS)
def test_what_a_child_cannot_do(act, tree, snapshot):
    before = snapshot(tree.root.parent)
    with pytest.raises(ProofError, match=r"PermissionError|Errno 1\b|Errno 13\b"):
        ask(tree, [lambda: ACTS[act](tree) and None])
    assert snapshot(tree.root.parent) == before


def test_what_it_could_do_without_a_sandbox(make_tree):
    """Else the test above would prove nothing."""
    for act in sorted(set(ACTS) - {"become a program", "leave the group"}):
        made = make_tree("0.25.1", {"vllm/a.py": "ONE = 1\n", "setup.py": ""})
        write_files(made.root.parent / "home/.ssh", {"id_ed25519": SECRET})
        free = replace(made, sandboxed=Sandboxed.NEVER)
        assert ask(free, [lambda act=act, free=free: ACTS[act](free) and None]) in (
            [None],
            [0],
        ), act
        shutil.rmtree(made.root)
        (made.root.parent / "new").unlink(missing_ok=True)


def test_the_first_landlock_will_do(tree, snapshot, monkeypatch):
    """Linux 5.13: no truncating, sockets or signals in it. The ruleset is real, and as small."""
    monkeypatch.setattr("patchkit.proof.landlock.version", lambda: 1)
    for act in ACTS:
        test_what_a_child_cannot_do(act, tree, snapshot)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86_64")
def test_calls_that_no_library_has(tree):
    """ptrace, reading of memory, namespaces, mounts, bpf, io_uring, keys; new ones, and x32's."""
    numbers = (
        101,
        310,
        272,
        165,
        161,
        321,
        425,
        250,
        298,
        323,
        157,
        29,
        68,
        435,
        437,
        999,
    )
    for number in (*numbers, 0x40000000 + 41):
        with pytest.raises(ProofError, match="AssertionError: denied"):
            ask(tree, [partial(_system_call, number)])


def test_what_a_child_can_do(tree, tmp_path):
    def reads():
        import wave  # a module that nobody has imported yet

        return [
            tree.read("vllm/a.py"),
            [each.name for each in (tree.root / "vllm").iterdir()],
            bool(wave.__doc__),
            *(dict(os.environ), os.isatty(0)),
        ]

    answers = ask(tree, [reads, lambda: Code(tree, {}).get("vllm/a.py", "ONE")])
    assert answers == [["ONE = 1\n", ["a.py"], True, {}, False], 1]
    assert set(tree.seen) == {"vllm/a.py"}  # what is read counts, wherever it is read
    # None of the parent's files is kept.
    with (tmp_path / "kept").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        with pytest.raises(ProofError, match=r"OSError: \[Errno 9\]"):
            ask(tree, [lambda: os.write(file.fileno(), b"x")])


# What ends it, and what it says then

SMALL = Limits(processor=1, clock=20, memory=64 << 20, output=1 << 16)


def _spin():
    while True:
        pass


def _spin_on():
    while True:
        try:
            _spin()
        except BaseException:  # noqa: BLE001
            continue


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (_spin, "more than 1 s of the processor"),
        pytest.param(
            *(_spin_on, "more than 1 s of the processor|killed by SIGKILL"),
            marks=pytest.mark.e2e,
        ),
        (lambda: bytearray(1 << 40), "MemoryError"),
        (lambda: "x" * 100_000, "wrote 65536 bytes or more"),
        (lambda: os._exit(0), "it answered with"),
        (sys.exit, "SystemExit"),
        (lambda: ctypes.string_at(0), "killed by SIGSEGV"),
        (lambda: [os.close(3), time.sleep(600)], "killed by SIGKILL"),
        (lambda: os.close(1), "Bad file descriptor|exit code 1"),
        (lambda: {(1, 2): 3}, "TypeError: keys must be"),
    ],
)
def test_what_ends_without_an_answer(question, said, tree):
    with pytest.raises(ProofError, match=said):
        ask(tree, [question], limits=SMALL)


@pytest.mark.parametrize(
    "forged",
    [
        b"\xff\xfe",
        b"[" * 60_000,
        b'{"answers": [1, 2], "raised": null, "read": []}',
        b'{"answers": [1], "raised": null, "read": ["../../etc/passwd"]}',
        b'{"answers": [1], "raised": null, "read": ["a\\u0000b"]}',
        b'{"answers": [1], "raised": {"kind": [], "what": 1, "why": 2, "hint": 3}, "read": []}',
        b'{"answers": [' + b"9" * 50_000 + b'], "raised": null, "read": []}',
    ],
)
def test_a_forged_answer_is_no_answer(forged, tree):
    def forge():
        os.write(1, forged)
        os._exit(0)

    with pytest.raises(ProofError):
        ask(tree, [forge])


def test_a_child_changes_nothing_here(tree):
    """It may turn patchkit's own functions into what it likes, and its answer is still data."""

    def take_over():
        questions.ask = None
        tree.seen["forged"] = "0"
        return "proved"

    assert ask(tree, [take_over]) == ["proved"]
    assert questions.ask is ask.func
    assert tree.seen == {"forged": ""}  # looked at here: there is no such file


# Programs

SYSTEM = tuple(map(Path, ("/usr", "/lib", "/lib64", "/etc/ld.so.cache")))


def test_a_program_reads_its_folder_and_starts_no_other(tmp_path):
    (tmp_path / "a").write_text("here\n")
    shell = Path("/bin/sh").resolve()
    box = replace(program_box(shell), read=(tmp_path, *SYSTEM))
    script = 'read x <a; echo "$x"; echo y >b; cat a; (echo z); echo "$HOME"'
    ended = run([str(shell), "-c", script], box, folder=tmp_path, environment={})
    assert ended.text.splitlines()[:1] == ["here"]
    assert not {"y", "z"} & set(ended.text.splitlines())
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_a_programs_output_and_time_have_limits(tmp_path):
    command = [sys.executable, "-c", "while True: print('x' * 1000)"]
    ended = run(command, None, folder=tmp_path, environment={}, limits=SMALL)
    assert ended.trouble
    assert len(ended.output) == SMALL.output
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    ended = run(
        command, None, folder=tmp_path, environment={}, limits=Limits(clock=0.2)
    )
    assert ended.trouble == "it ran longer than 0.2 s"


@pytest.mark.parametrize("ignored", [(), (signal.SIGHUP,)], ids=["", "nohup"])
def test_a_program_ends_by_signals_that_python_ignores(ignored, tmp_path):
    """What the caller was told to ignore, as by nohup, a program ignores as well."""
    former = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    try:
        command = [shutil.which("grep"), "SigIgn", "/proc/self/status"]
        ended = run(command, None, folder=tmp_path, environment={})
    finally:
        for number, action in former.items():
            signal.signal(number, action)
    mask = int(ended.text.split()[1], 16)
    looked_at = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGHUP)
    assert [number for number in looked_at if mask >> number - 1 & 1] == [*ignored]


def test_a_sandbox_that_cannot_be_set_up_is_said_before_anything_runs(tmp_path):
    done = tmp_path / "done"
    with pytest.raises(
        StorageError, match=r"a child process cannot be set up: .* 'gone'"
    ):
        forked(done.touch, None, folder=Path("gone"))
    with pytest.raises(HostError, match="the sandbox cannot be set up: "):
        forked(done.touch, Box(), folder=Path("gone"))
    assert not done.exists()


def test_a_child_dies_with_its_parent(tmp_path):
    code = "import time\nfrom patchkit.proof import child_process, sandbox\n"
    code += "child_process.forked(lambda: time.sleep(600), sandbox.Box())\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        while not (child := children.read_text().strip()) and parent.poll() is None:
            time.sleep(0.01)
        assert child
        # Its name of the group shows that it asked for its parent's signal before.
        while os.getpgid(int(child)) != int(child) or _state(child) != "S":
            time.sleep(0.01)
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 20
    while _state(child) not in "XZ":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
