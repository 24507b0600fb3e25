"""`patchkit doctor` on this machine and of a log, and `patchkit explain`, as users call them."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest

from patchkit.finding import Level
from support.archives import archive_texts
from support.model_server import ModelServer
from support.needed import need


@pytest.fixture
def here(cli):
    """Run doctor on this machine, whose server listens at a port; return what it found."""

    def run(*options, rc=(0, 9)):
        said = cli("doctor", *options, "--json", rc=rc)
        return {each["about"]: each for each in json.loads(said.stdout)["findings"]}

    return run


def test_a_vllm_that_answers_is_the_server_whoever_started_it(here):
    with ModelServer() as server:
        port = server.server_address[1]
        found = here("--port", port)
    assert found["server-token"]["what"].startswith("small answers")
    seen = Level.OK if shutil.which("ss") else Level.UNKNOWN
    assert (found["server-token"]["level"], found["port"]["level"]) == (Level.OK, seen)
    assert (str(port) if seen is Level.OK else "ss is not installed") in found["port"][
        "what"
    ]
    assert found["log"]["level"] == Level.UNKNOWN
    assert found["log"]["what"].startswith("not checked: ")


def test_of_one_node_in_a_file_all_is_asked_that_up_needs(here, tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text(f'venv = "{tmp_path}/none"\n[[node]]\nssh = "localhost"\n')
    assert here("--file", file)["python"]["level"] == Level.ERROR
    assert here("--venv", tmp_path / "none")["python"]["level"] == Level.NOTE


def test_what_answers_otherwise_has_the_port_and_is_never_fine(here):
    need("ss")
    with socket.create_server(("127.0.0.1", 0)) as other:
        found = here("--port", other.getsockname()[1], rc=9)
    assert found["port"]["level"] == Level.ERROR
    assert found["port"]["hint"] == f"kill {os.getpid()}"
    assert found["server-health-silent"]["level"] == Level.ERROR


def test_another_engine_is_named_and_a_port_is_the_first_step(here):
    need("ss")
    with ModelServer(other_engine=True) as server:
        port = server.server_address[1]
        found = here("--port", port, rc=9)
    assert "port" not in found
    assert "it serves small, and is no vLLM" in found["port-serves"]["what"]
    assert found["port-serves"]["hint"].startswith(
        f"patchkit doctor --port {port + 1}; "
    )


# Logs

CUDA12 = "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"
LOG = f"""\
INFO 11-22 10:00:00 [api_server.py:1] vLLM API server version 0.25.1
\x1b[36m(EngineCore_DP0 pid=7)\x1b[0m ERROR 11-22 10:00:01 [core.py:1] {CUDA12}\r
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_a_log_with_its_first_cause_first(cli, tmp_path):
    log = tmp_path / "vllm.log"
    log.write_text(LOG)
    shown = cli("doctor", "--log", log, rc=9).stdout
    said = json.loads(cli("doctor", "--log", log, "--json", rc=9).stdout)
    assert [
        (each["about"], each["line"], each["level"]) for each in said["findings"]
    ] == [
        ("cuda-12-library-missing", 2, "error"),
        ("engine-core-failed", 3, "note"),
    ]
    assert "consequences: engine-core-failed; -v" in shown
    assert f"{log}:3" not in shown
    assert "next:" in shown


def test_an_error_that_nobody_knows_on_standard_input(environment, tmp_path):
    words = [sys.executable, "-m", "patchkit", "doctor", "--log", "-", "--json"]
    text = b"KeyError: 'nobody knows'\n"
    done = subprocess.run(
        words, input=text, cwd=tmp_path, env=environment, capture_output=True
    )
    assert done.returncode == 9, done.stderr
    assert [each["about"] for each in json.loads(done.stdout)["findings"]] == [
        "unknown"
    ]


def test_a_report_has_the_lines_around_what_was_found(cli, tmp_path):
    log, report = tmp_path / "vllm.log", tmp_path / "report.tar.gz"
    key = "INFO 11-22 10:00:00 [a.py:1] token hf_abcdefghijABCDEFGHIJ1234567890abcd\n"
    log.write_text("\n" * 99 + key + "KeyError: 'nobody knows'\n" + "\n" * 99)
    cli("doctor", "--log", log, "--save", report, rc=9)
    lines = archive_texts(report)["logs/journal.txt"].splitlines()
    assert lines[3].endswith(": KeyError: 'nobody knows'")
    assert lines[2].endswith("token secret-1")
    assert len(lines) == 14


def test_explain_by_the_text_of_an_error(cli):
    by_line = json.loads(cli("explain", f"[rank1]: {CUDA12}", "--json").stdout)[
        "symptoms"
    ]
    by_part = json.loads(cli("explain", "libcudart.so.12", "--json").stdout)["symptoms"]
    assert [each["id"] for each in by_line] == ["cuda-12-library-missing"]
    assert "cuda-12-library-missing" in [each["id"] for each in by_part]
    assert "cure" in cli("explain", "cuda-12-library-missing").stdout
    said = cli("explain", "cuda-12-libary-missing", rc=2).stderr
    assert "patchkit explain cuda-12-library-missing" in said


def test_a_line_that_is_quoted_keeps_no_secret(cli, tmp_path):
    log = tmp_path / "vllm.log"
    log.write_text(
        "RuntimeError: odd {'api_key': ['s3cr3t-1'], 'url': 'http://u:pw9@h'}\n"
    )
    for more in ((), ("--json",)):
        said = cli("doctor", "--log", log, *more, rc=9).stdout
        assert "odd {'api_key': ['(masked)'], 'url': 'http://(masked)@h'}" in said
