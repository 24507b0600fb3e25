"""An owner's proof: nothing private in it, nothing hostile read, no process left of it."""

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time

import pytest

from patchkit.doctor.bundle import PrivateNames
from patchkit.doctor.gpu_steps import GpuStep, run_step
from patchkit.errors import BusyError, HostError, SourceError
from patchkit.measure import proof_script
from patchkit.measure.proof import (
    check_free,
    hold_server,
    part_names,
    session_cpu,
    wait_until_ready,
)
from patchkit.measure.proof_archive import SCHEMA, Proof, pack_proof, parse_proof, summary_lines
from patchkit.records import record
from support import write_files
from support.clusters import reports
from tools import known

NAMES = PrivateNames(hosts=(("spark-3995",),), users=("annalena",), addresses=("192.168.177.11",))
FIGURES = {
    "kernel-fa2": {"first_s": 31.2, "first_kept_s": 0.01, "error": 0.017},
    "nccl-roce": {"microseconds_8": 30.1, "gigabytes_per_second_268435456": 22.5},
    "serve-cold": {"ready_s": 180.0, "tokens_per_s": 31.0, "cores_busy": 2.1, "cores_idle": 0.02},
}
KERNEL = "Fp8LinearMethod CutlassFP8ScaledMMLinearKernel, Fp8MoEMethod TRITON TritonExperts"


def made_proof(**changes):
    parts = [
        {"step": it, "state": "ok", "figures": FIGURES.get(it, {}), "kernel": KERNEL}
        if it in FIGURES or it.startswith("routing")
        else {"step": it, "state": "not-run", "reason": "torch on spark-3995:\a\nno device"}
        for it in part_names()
    ]
    proof = {"schema": SCHEMA, "patchkit": "1", "date": "2026-11-26", "device": "NVIDIA GB10"}
    proof |= {"capability": "12.1", "driver": "580.95.05", "vllm": "0.33.0", "torch": "2.13.0"}
    proof |= {"model": "random weights", "parts": parts, "machines": [], "findings": []}
    proof |= {"code": {"_vllm_fa2_C.abi3.so": {"sm_80 compute_80": 52}}, **changes}
    logs = {"serve-cold": "annalena@spark-3995 listens at 192.168.177.11\nHF_TOKEN=qwertz99"}
    return pack_proof(record(Proof, proof), logs, NAMES)


def archive_of(data, *names, link="", sparse=0):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = (tarfile.SYMTYPE if link else tarfile.REGTYPE), link
            member.size = len(data)
            if sparse:  # as PAX has it: a file of so many bytes, of which few are there
                its = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": "0,1"}
                member.pax_headers = {**its, "GNU.sparse.size": str(sparse)}
            archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def test_an_archive_is_the_same_each_time_and_has_no_private_names():
    proof, packed = made_proof()
    assert packed == made_proof()[1]
    assert parse_proof(packed, "x") == proof
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        texts = {each.name: archive.extractfile(each).read().decode() for each in archive}
    assert [*texts] == ["logs/serve-cold.txt", "proof.json", "summary.txt"]
    for private in ("annalena", "3995", "192.168.177.11", "qwertz99"):
        assert private not in "".join(texts.values())
    lines = texts["summary.txt"].splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 80
    assert "compiled at first use: vllm_fa2_C 52 of 52" in lines
    assert texts["summary.txt"].replace("\n", "").isprintable()
    assert "routing-fp8: CutlassFP8, TRITON" in lines


HOSTILE = {
    "no archive": b"hello",
    "cut short": made_proof()[1][:-40],
    "a path upwards": archive_of(b"{}", "../proof.json"),
    "a link": archive_of(b"", "proof.json", link="/etc/passwd"),
    "a sparse file": archive_of(b"{", "proof.json", sparse=1 << 40),
    "not JSON": archive_of(b"[" * 100_000, "proof.json"),
    "another version": archive_of(b'{"schema": 2}', "proof.json"),
    "many members": archive_of(b"", *(f"logs/{number}.txt" for number in range(100))),
    "a bomb": gzip.compress(bytes(64 << 20)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_proof_is_refused(name):
    with pytest.raises(SourceError, match=r"^x: "):
        parse_proof(HOSTILE[name], "x")


def test_an_archive_is_one_row_of_the_page_and_its_words_are_plain(tmp_path, monkeypatch):
    begin, end = f"<!-- {known.MARK[0]}: {known.MARK[1]} -->", f"<!-- /{known.MARK[0]} -->"
    page = write_files(tmp_path, {"known.md": f"before\n{begin}\n{end}\nafter\n"}) / "known.md"
    first, second = tmp_path / "a.tar.gz", tmp_path / "b.tar.gz"
    first.write_bytes(made_proof()[1])
    second.write_bytes(made_proof(device="x | <script> `rm`\n| y |")[1])
    texts = []
    for archives in ([first], [first, first], [second], [first, second]):
        monkeypatch.setattr(sys, "argv", ["known", *map(str, archives), "--page", str(page)])
        assert known.main() == 0
        texts.append(page.read_text())
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    rows = known.read_rows(texts[-1])
    assert [row[0] for row in rows] == ["NVIDIA GB10", "x ? ?script? ?rm? y ?"]
    assert rows[0][1:4] == ["580.95.05", "0.33.0", "2026-11-26"]
    assert rows[0][6:11] == [
        "31.2, 0.01 s",
        "; ".join(["CutlassFP8, TRITON"] * 4),
        "180.0, ? s",
        "31.0, ?",
        "22.5 GB/s, not run",
    ]


def test_without_a_gpu_there_is_an_archive_with_the_reasons(cli, tmp_path):
    place = tmp_path / "gb10.tar.gz"
    done = cli("proof", "-o", place, "--venv", tmp_path, "--json", rc=9)
    said = json.loads(done.stdout)
    assert {part["state"] for part in said["parts"]} == {"not-run"}
    assert summary_lines(parse_proof(place.read_bytes(), "x")) == said["summary"]
    assert "is there already" in cli("proof", "-o", place, rc=2).stderr


def test_beside_a_served_model_nothing_is_tried(tmp_path):
    _file, nodes = reports(tmp_path)
    with pytest.raises(BusyError, match="still runs") as raised:
        check_free(nodes)
    assert raised.value.hint == "patchkit down"


def test_an_interrupt_leaves_no_file(environment, tmp_path):
    words = [sys.executable, "-m", "patchkit", "proof", "-o", str(tmp_path / "a.tar.gz")]
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline().startswith("serves random weights")
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 128 + signal.SIGINT
    assert [*tmp_path.glob("*.tar.gz*")] == []


def test_a_kernel_without_a_gpu_says_why(tmp_path):
    torch = "class cuda:\n    def is_available(): return False\n"
    write_files(tmp_path, {"torch.py": torch})
    settings = {"step": "kernel-fa2", "script": "kernel", "group": "fa2", "seconds": 30}
    settings["file"] = proof_script.__file__
    said = run_step(sys.executable, settings, {"PYTHONPATH": str(tmp_path)})
    assert isinstance(said, GpuStep)
    assert (said.state, said.reason) == ("not-run", "torch sees no CUDA device")


# Two processes of one session, both deaf to SIGTERM.
DEAF = """\
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if not os.fork():
    open(sys.argv[1], "x")
time.sleep(60)
"""


def test_no_process_of_a_server_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("patchkit.measure.proof._GRACE", 0.5)
    command = [sys.executable, "-c", DEAF, str(tmp_path / "2")]
    with hold_server(command, dict(os.environ), tmp_path / "log") as server:
        end = time.monotonic() + 10
        while not (tmp_path / "2").exists() and time.monotonic() < end:
            time.sleep(0.05)
        assert session_cpu(server.pid)
    assert session_cpu(server.pid) == {}
    with hold_server(["false"], dict(os.environ), tmp_path / "log") as server:  # noqa: SIM117
        with pytest.raises(HostError, match="ended with 1"):
            wait_until_ready(server, "http://127.0.0.1:9", time.monotonic() + 10)
