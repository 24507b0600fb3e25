"""Programs that are run: what they say, and what their failures become."""

import os
import sys

import pytest

from patchkit.errors import BuildError, HostError, StorageError
from patchkit.follow import Resources
from patchkit.process import ask, attempt, run
from support import write_files

PYTHON = sys.executable


def python(code, *words, **options):
    return attempt(PYTHON, "-c", code, *words, **options)


def test_what_a_program_says_is_text_whatever_its_bytes_are():
    said = python(
        "import sys; sys.stdout.buffer.write(b'a\\xff\\n'); sys.stderr.write('b')"
    )
    assert (said.status, said.output, said.errors, said.trouble) == (
        0,
        "a\ufffd\n",
        "b",
        "",
    )


def test_a_program_has_what_it_is_given(tmp_path):
    """Words, input, variables, folder; the umask is for it alone."""
    code = "import os, sys; print(sys.argv[1:], sys.stdin.read(), os.environ['X'], os.getcwd())"
    done = python(code, "$(id)", "a b", input=b"in", env={"X": "1"}, cwd=tmp_path)
    assert done.output == f"['$(id)', 'a b'] in 1 {tmp_path}\n"
    former = os.umask(0o077)
    try:
        python("open('made', 'w')", cwd=tmp_path, umask=0o022)
        (tmp_path / "own").touch()
    finally:
        os.umask(former)
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("resources", "code", "trouble"),
    [
        (
            Resources(processor=1),
            "while True: pass",
            "it took more than 1 s of the processor",
        ),
        (
            Resources(written=1 << 16),
            "open('x', 'wb').write(bytes(1 << 17))",
            "it wrote more than 65536 bytes",
        ),
        (Resources(memory=1 << 30), "bytearray(1 << 30)", "exit code 1: "),
    ],
)
def test_a_program_takes_no_more_than_it_may(tmp_path, resources, code, trouble):
    """Python itself ignores SIGXFSZ: the default action comes back first.

    The program waits for its limit, which it gets a moment after its start.
    """
    before = (
        "import resource as r, signal; signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n"
        "kinds = r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_FSIZE\n"
        "while all(r.getrlimit(kind)[0] == r.RLIM_INFINITY for kind in kinds): pass\n"
    )
    code = before + code
    done = python(code, cwd=tmp_path, resources=resources)
    assert done.trouble.startswith(trouble)
    assert done.ended_itself


@pytest.mark.parametrize(
    ("words", "itself"),
    [
        (("sh", "-c", "exit 3"), True),
        (("sh", "-c", "kill -SEGV $$"), True),
        (("sh", "-c", "kill -KILL $$"), False),
        (("sh", "-c", "kill -TERM $$"), False),
        (("/no/such/program",), False),
    ],
)
def test_whether_a_program_ended_itself(words, itself):
    assert attempt(*words).ended_itself == itself


def test_how_a_program_ended():
    for code, status, trouble in (
        ("raise SystemExit(3)", 3, "exit code 3: it printed nothing"),
        (
            "print('a\\n' * 20 + 'b'); raise SystemExit(2)",
            2,
            "exit code 2: " + "a\n" * 7 + "b",
        ),
        (
            "import os; os.kill(os.getpid(), 9)",
            -9,
            "killed by SIGKILL: it printed nothing",
        ),
    ):
        done = python(code)
        assert (done.status, done.trouble) == (status, trouble)
        with pytest.raises(BuildError, match=trouble) as caught:
            run(PYTHON, "-c", code, kind=BuildError, why="so", hint="do that")
        assert (caught.value.why, caught.value.hint) == ("so", "do that")
        if status > 0:
            assert run(PYTHON, "-c", code, check=False).status == status


def test_a_program_that_is_missing_or_cannot_be_started(tmp_path):
    for check in (True, False):
        with pytest.raises(
            HostError, match=r"^nosuch-program is not installed"
        ) as caught:
            run("nosuch-program", "-x", kind=StorageError, check=check)
        assert caught.value.hint
    assert (
        attempt(tmp_path / "nosuch").trouble
        == "does not run: No such file or directory"
    )
    assert attempt(PYTHON, "-V", env={"PATH": "/"}).status == 0
    assert attempt("sh", env={"PATH": str(tmp_path)}).trouble == "is not installed"
    write_files(tmp_path, {"script": "#!/no/interpreter\n"}, mode=0o755)
    assert (
        attempt(tmp_path / "script").trouble
        == "does not run: No such file or directory"
    )
    assert attempt(tmp_path).trouble == "does not run: Permission denied"
    assert attempt("true", "a\0b").trouble == "does not run: embedded null byte"
    assert str(tmp_path / "none") in attempt("true", cwd=tmp_path / "none").trouble


def test_a_program_that_takes_too_long_is_ended():
    with pytest.raises(
        StorageError, match=r"`sleep 60` failed: no answer within 0\.1 s"
    ):
        run("sleep", "60", timeout=0.1, kind=StorageError, check=False)
    with pytest.raises(HostError, match=r"no answer within 0\.1 s"):
        ask(PYTHON, "import time; time.sleep(600)", timeout=0.1)


def test_another_python_answers_in_json():
    code = "import sys\nprint('noise')\nanswer = [*sys.argv[1:], sys.flags.isolated]"
    assert ask(PYTHON, code, "a", "b c") == ["a", "b c", 1]
    code = "import os\nanswer = os.environ['X']"
    assert ask(PYTHON, code, env={"X": "é"}, isolated=False) == "é"


def test_a_python_that_does_not_answer_is_refused():
    for python, code, what in (
        ("/nosuch/python", "", "/nosuch/python does not run: No such file"),
        ("/bin/true", "", "/bin/true: exit code 0: it printed no answer"),
        (PYTHON, "import nosuch", "ModuleNotFoundError: No module named 'nosuch'"),
        (PYTHON, "print('patchkit:{', flush=True); exit()", "its answer is not JSON"),
    ):
        with pytest.raises(HostError) as caught:
            ask(python, code, hint="name another")
        assert what in caught.value.what
        assert caught.value.hint == "name another"
