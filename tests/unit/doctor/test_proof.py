"""An owner's proof: nothing private in it, nothing hostile read, no process left of it."""

import gzip
import io
import json
import signal
import sys
import tarfile
from dataclasses import replace
from types import SimpleNamespace

import pytest

from patchkit.doctor import proof
from patchkit.doctor.archive import FieldMap
from patchkit.doctor.gpu_steps import GpuStep
from patchkit.doctor.private_names import PrivateNames
from patchkit.doctor.proof_record import (
    SCHEMA,
    Proof,
    pack_proof,
    summary_lines,
)
from patchkit.durable.signals import Interrupted
from patchkit.errors import BusyError, HostError, SourceError
from patchkit.records import record
from patchkit.runtime.host.host import Software
from support import write_files
from support.archives import archive_texts
from support.clusters import node_facts, reports
from tools import known
from tools.known import parse_proof

NAMES = PrivateNames(
    hosts=(("spark-3995",),), users=("annalena",), addresses=("192.168.177.11",)
)
FIGURES = {
    "gpu-fp8": {"error": 0.017},
    "nccl-roce": {"microseconds_8": 30.1, "most_gigabytes_per_second": 22.5},
}
KERNEL = "CutlassFP8ScaledMMLinearKernel, TRITON"
PARTS = [name for names in proof.plan_parts().values() for name in names]


def made_proof(**changes):
    parts = [
        {"step": it, "state": "ok", "figures": FIGURES.get(it, {}), "kernel": KERNEL}
        if it in FIGURES or it.startswith("routing")
        else {
            "step": it,
            "state": "not-run",
            "reason": "torch on spark-3995:\a\nno device",
        }
        for it in PARTS
    ]
    its = {
        "schema": SCHEMA,
        "patchkit": "1",
        "date": "2026-11-26",
        "device": "NVIDIA GB10",
    }
    its |= {
        "capability": "12.1",
        "driver": "580.95.05",
        "vllm": "0.33.0",
        "torch": "2.13.0",
    }
    its |= {"parts": parts, "machines": [], "findings": []}
    its |= {"code": {"_vllm_fa2_C.abi3.so": {"sm_80 compute_80": 52}}, **changes}
    logs = {
        "nccl-roce": "annalena@spark-3995 listens at 192.168.177.11\nHF_TOKEN=qwertz99"
    }
    return pack_proof(record(Proof, its), logs, NAMES)


def archive_of(data, *names, kind=tarfile.REGTYPE, **headers):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.type, member.size, member.pax_headers = kind, len(data), headers
            archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


@pytest.mark.parametrize(
    "name", [*Proof.__dataclass_fields__, "reason", "ok", "gpu-fp8"]
)
def test_a_user_or_host_may_have_any_name(name):
    machine = FieldMap(model="GB10", paths={name: name})
    finding = FieldMap(where="here", what=f"{name} lacks a driver")
    names = PrivateNames(hosts=((f"{name}.lan", name),), users=(name,))
    proof = replace(made_proof()[0], machines=(machine,), findings=(finding,))
    proof, _packed = pack_proof(proof, {}, names)
    assert ("gpu-fp8", "ok") in {(part.step, part.state) for part in proof.parts}
    assert proof.machines[0].keys() == {"model", "paths"}


# A file of so many bytes, of which few are there.
SPARSE = {"major": "0", "minor": "1", "map": "0,1", "size": str(1 << 40)}
SPARSE = {f"GNU.sparse.{key}": value for key, value in SPARSE.items()}


def test_an_archive_is_the_same_each_time_and_has_no_private_names():
    made, packed = made_proof()
    assert packed == made_proof()[1]
    assert parse_proof(packed, "x") == made
    texts = archive_texts(packed)
    assert [*texts] == [
        "logs/nccl-roce.txt",
        "manifest.json",
        "proof.json",
        "summary.txt",
    ]
    for private in ("annalena", "3995", "192.168.177.11", "qwertz99"):
        assert private not in "".join(texts.values())
    lines = texts["summary.txt"].splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 80
    assert "compiled at first use: vllm_fa2_C 52 of 52" in lines
    assert texts["summary.txt"].replace("\n", "").isprintable()
    assert "routing-fp8: CutlassFP8, TRITON" in lines


def test_a_reason_is_whole_and_stands_once():
    reason = "FlashInferFp8DeepGEMMDynamicBlockScaledKernel: the product is wrong: error 0.11"
    step = {
        "step": "gpu-fp8-blocks",
        "state": "failed",
        "kernel": "X" * 40,
        "reason": reason,
    }
    made, _packed = made_proof(
        parts=[*({"step": part, "state": "ok"} for part in PARTS), step]
    )
    lines = summary_lines(made)
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines).split()).count(reason) == 1
    assert lines[4].startswith("gpu-fp8-blocks (XX")  # before what went well

    many = [
        {"step": part, "state": "failed", "reason": f"{part}: {reason}"}
        for part in PARTS
    ]
    text = " ".join(" ".join(summary_lines(made_proof(parts=many)[0])).split())
    assert text.count(reason) == len(PARTS)

    same = [{"step": part, "state": "not-run", "reason": reason} for part in PARTS]
    text = " ".join(" ".join(summary_lines(made_proof(parts=same)[0])).split())
    assert text.count(f"{len(PARTS)} parts: not-run: {reason}") == 1
    assert text.count(reason) == 1


HOSTILE = {
    "no archive": b"hello",
    "cut short": made_proof()[1][:-40],
    "a path upwards": archive_of(b"{}", "../proof.json"),
    "a link": archive_of(b"", "proof.json", kind=tarfile.SYMTYPE),
    "a sparse file": archive_of(b"{", "proof.json", **SPARSE),
    "not JSON": archive_of(b"[" * 100_000, "proof.json"),
    "another version": archive_of(b'{"schema": 2}', "proof.json"),
    "many members": archive_of(b"", *(f"logs/{number}.txt" for number in range(100))),
    "a bomb": gzip.compress(bytes(64 << 20)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_proof_is_refused(name):
    with pytest.raises(SourceError, match=r"^x: "):
        parse_proof(HOSTILE[name], "x")


def test_an_archive_is_one_row_of_the_page_and_its_words_are_plain(
    tmp_path, monkeypatch
):
    page = (
        write_files(tmp_path, {"known.md": f"| head |\n{known.END}\nafter\n"})
        / "known.md"
    )
    first, second = tmp_path / "a.tar.gz", tmp_path / "b.tar.gz"
    first.write_bytes(made_proof()[1])
    second.write_bytes(made_proof(device="x | <script> `rm`\n| y |")[1])
    for archives in ([first], [first, second]):
        monkeypatch.setattr(
            sys, "argv", ["known", *map(str, archives), "--page", str(page)]
        )
        assert known.main() == 0
    head, one, other, *end = page.read_text().splitlines()
    assert (head, end) == ("| head |", ["", known.END.strip(), "after"])
    assert other.startswith(
        "| x ? ?script? ?rm? y ? | 580.95.05 | 0.33.0 | 2026-11-26 |"
    )
    routing = "; ".join(["CutlassFP8, TRITON"] * 4)
    figures = f"{routing} | 22.5 GB/s, not run"
    assert f"| vllm_fa2_C 52 of 52 | {figures} |" in one


def test_without_vllm_there_is_one_reason_and_no_archive(cli, tmp_path):
    place = tmp_path / "gb10.tar.gz"
    said = cli("proof", "-o", place, "--venv", tmp_path / "venv", rc=9).stderr
    assert said.count("no Python with vLLM is there") == 1
    assert f"{tmp_path / 'venv'}/bin/python: no Python with vLLM is there" in said
    assert "patchkit proof -o FILE --venv DIR" in said
    assert not place.exists()


@pytest.mark.parametrize(
    ("venv", "version", "why"),
    [
        ("", "", "there is none"),
        ("/v", "", "it has none"),
        ("", "0.24.0", "vLLM 0.24.0 is imp"),
    ],
)
def test_a_vllm_elsewhere_is_named_with_the_option_that_takes_it(
    tmp_path, venv, version, why
):
    software = Software(python="/opt/python3", vllm=version)
    facts = node_facts(tmp_path)
    facts = replace(facts, venv=venv, host=replace(facts.host, software=software))
    with pytest.raises(HostError) as raised:
        proof.require_vllm(facts, "/v")
    assert why in raised.value.why
    proof.require_vllm(replace(facts, venv="/v", host=node_vllm(facts)), "/v")


def node_vllm(facts):
    return replace(facts.host, software=Software(python="/v/bin/python", vllm="0.33.0"))


def test_without_a_gpu_there_is_an_archive_with_the_reasons(cli, tmp_path):
    """An environment with a vLLM beside a torch that does not load."""
    python = f'#!/bin/sh\nPYTHONPATH={tmp_path}/site exec {sys.executable} "$@"\n'
    files = {
        "venv/bin/python": python,
        "site/torch.py": "raise ImportError('no torch')",
    }
    files |= {
        "site/vllm/__init__.py": "",
        "site/vllm/_version.py": "__version__ = '0.33.0'\n",
    }
    write_files(tmp_path, files, mode=0o755)
    place = tmp_path / "gb10.tar.gz"
    done = cli("proof", "-o", place, "--venv", tmp_path / "venv", "--json", rc=9)
    said = json.loads(done.stdout)
    assert {part["state"] for part in said["parts"]} == {"not-run"}
    assert summary_lines(parse_proof(place.read_bytes(), "x")) == said["summary"]
    assert "is there already" in cli("proof", "-o", place, rc=2).stderr


def test_beside_a_served_model_nothing_is_tried(tmp_path):
    _file, nodes = reports(tmp_path)
    with pytest.raises(BusyError, match="still runs") as raised:
        proof.check_free(nodes)
    assert raised.value.hint == "patchkit down"


def test_what_cannot_run_says_why_and_an_interrupt_keeps_the_rest(monkeypatch):
    def start(_request):
        yield GpuStep(step="gpu-device", state="ok")
        raise HostError("no cable")

    def end(_request):
        raise Interrupted(signal.SIGINT)

    runs = (start, end)
    planned = dict(zip(runs, proof.plan_parts().values(), strict=True))
    monkeypatch.setattr(proof, "plan_parts", lambda: planned)
    parts, interrupt = proof.run_parts(None, lambda _line: None)
    assert [part.step for part in parts] == PARTS
    reasons = ["", *["no cable"] * 8, *["interrupted"] * 2]
    assert [part.reason for part in parts] == reasons
    assert interrupt.exit_code == 130


def test_a_path_that_nccl_did_not_take_has_no_figures(monkeypatch):
    said = "x:1:1 [0] NCCL INFO Using network Socket"
    rank = GpuStep(step="", state="ok", figures={"microseconds_8": 30.0}, lines=(said,))
    monkeypatch.setattr(proof, "run_all_reduce", lambda *_: [rank, rank])
    roce, socket = proof.time_paths(SimpleNamespace(nodes=[], apart=""))
    assert (roce.reason, roce.figures, socket.figures) == (
        "NCCL took no IB",
        {},
        rank.figures,
    )
