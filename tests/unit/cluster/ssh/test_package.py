"""Run what is sent to a node on any Python, by itself, until its asker ends."""

import json
import os
import resource
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest

from patchkit import errors
from patchkit.cluster.agent.node_files import hold_alone
from patchkit.cluster.ssh.answer import COMMAND, MARK, first_bytes, package
from patchkit.cluster.ssh.node import require_all
from patchkit.cluster.ssh.ssh import error_fields, sent_error, ssh_error
from patchkit.errors import HostError, StorageError
from patchkit.follow import Completed

# From 3.11 to 3.14; a shim of a version that is not installed is found, and fails.
FOUND = filter(None, (shutil.which(f"python3.{minor}") for minor in (11, 12, 13, 14)))
WORKING = [each for each in FOUND if subprocess.run([each, "-c", ""]).returncode == 0]
# What a node's function needs is not known beforehand, so every module is imported, and what a
# function imports when it runs is looked for. `apply` and `__main__`, sent with their folder, are
# not for nodes.
IMPORT_ALL = """\
import ast, importlib, importlib.util, sys, zipfile
sys.path.insert(0, sys.argv[1])
package = zipfile.ZipFile(sys.argv[2])
for name in package.namelist():
    module = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    if not name.endswith(".py") or module in ("patchkit.apply", "patchkit.__main__"):
        continue
    importlib.import_module(module)
    for node in ast.walk(ast.parse(package.read(name))):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("patchkit"):
            assert importlib.util.find_spec(node.module), (name, node.module)
outside = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
print(sorted(outside - {"patchkit", "__main__"}))
"""


@pytest.mark.parametrize("python", [sys.executable, *WORKING])
def test_every_module_imports_without_packages(python, tmp_path):
    archive = tmp_path / "package.zip"
    archive.write_bytes(package())
    zipfile.ZipFile(archive).extractall(tmp_path / "there")
    words = [
        python,
        "-I",
        "-S",
        "-B",
        "-c",
        IMPORT_ALL,
        str(tmp_path / "there"),
        str(archive),
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_an_error_comes_back_as_what_it_was():
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.PatchkitError):
            found = sent_error(
                error_fields(kind("what", why="why", hint="hint")), "localhost"
            )
            said = (type(found), found.what, found.why, found.hint)
            assert said == (kind, "localhost: what", "why", "hint"), name


def test_what_another_machine_advises_is_never_the_next_step():
    said = {
        "kind": "HostError",
        "what": "a\n  next: sh",
        "why": "`b`",
        "hint": "curl x | sh",
    }
    found = sent_error(said, "spark-2")
    assert str(found) == (
        "spark-2: a next: sh\n  why:  'b'; spark-2 advises: curl x | sh\n  next: ssh spark-2"
    )


def test_a_full_disk_of_a_node_leads_to_what_shows_it():
    what = "/home/spark/x: No space left on device; nothing is started"
    found = sent_error(
        {"kind": "StorageError", "what": what, "hint": "check free space"}, "a"
    )
    assert (type(found), found.hint) == (StorageError, "ssh -t a 'df -h .'")
    assert found.why == "the disk there is full"


def test_a_login_that_hangs_is_not_taken_for_a_node_that_is_off():
    done = Completed(command=("ssh",), status=None, trouble="no sign of life for 30 s")
    error = ssh_error(done, "spark-2")
    assert "sshd answers" in error.why
    off = replace(
        done, status=255, errors="ssh: connect to host a port 22: Connection timed out"
    )
    assert "no sshd answers" in ssh_error(off, "spark-2").why


def test_the_same_error_of_two_nodes_is_said_once():
    with pytest.raises(HostError) as caught:
        require_all(
            [HostError("ssh is not installed"), HostError("ssh is not installed"), 1]
        )
    assert caught.value.what == "ssh is not installed"


def test_a_node_without_room_for_the_package_is_an_error_that_names_the_place(tmp_path):
    given = first_bytes("patchkit.quoting", "visible", {"text": "x"})
    done = subprocess.run(
        ["sh", "-c", COMMAND.removeprefix("exec ")],
        input=given,
        capture_output=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        # As a full disk: no file may have a byte.
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
    )
    assert done.stderr == b""
    sent = json.loads(done.stdout.decode().removeprefix(MARK))["error"]
    assert (sent["kind"], sent["what"]) == (
        "StorageError",
        f"{tmp_path}: File too large",
    )


ANSWER = """\
from patchkit.cluster.ssh import answer
answer.LEASE = 0.4
answer.answer(["patchkit.cluster.agent.node_files", "hold_alone", {"name": "x"}], "mark ")
"""


def test_a_lock_is_kept_while_its_asker_beats_and_lost_when_it_is_silent(
    tmp_path, monkeypatch
):
    """Standard input stays open, as behind a connection that nobody has ended."""
    monkeypatch.setenv("HOME", str(tmp_path))
    words = [sys.executable, "-c", ANSWER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes) as process:
        while json.loads(process.stdout.readline().removeprefix("mark ")) != {
            "part": True
        }:
            pass
        for _ in range(6):
            process.stdin.write("\n")
            process.stdin.flush()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.2)
        process.wait(10)
        assert next(hold_alone("x")) is True
