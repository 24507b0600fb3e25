"""Read which network NCCL took, from logs of several releases, and compare it with an env file."""

from pathlib import Path

import pytest

from patchkit.doctor.nccl_lines import nccl_findings, read_nccl
from patchkit.finding import Level

LOGS = Path(__file__).parents[2] / "data" / "logs" / "nccl"
# HPC-X's plugin below Ray (mark-ramsey-ri/vllm-dgx-spark #1, lines between these are left out);
# forms of NCCL 2.29.7's own sources, with the names of a Spark; NVIDIA/nccl #1267, #1232 (2.19).
PLUGIN, OWN, SOCKET = (
    (LOGS / f"{name}.log").read_text() for name in ("plugin", "own", "socket")
)
ENV = {"NCCL_IB_HCA": "=rocep1s0f0,roceP2p1s0f0", "NCCL_SOCKET_IFNAME": "=enp1s0f0np0"}


def judged(text, **meant):
    return {
        each.about: each
        for each in nccl_findings("spark-1", read_nccl(text.splitlines()), meant)
    }


def test_what_a_log_says():
    (rank,) = read_nccl(OWN.splitlines())
    assert (rank.name, rank.ranks, rank.network) == ("rank 0", 2, "IB")
    assert (rank.words["version"], rank.words["bootstrap"]) == ("2.29.7", "enp1s0f0np0")
    assert [*rank.devices] == ["rocep1s0f0", "roceP2p1s0f0"]
    assert rank.settings == {"NCCL_IB_HCA": "=rocep1s0f0,roceP2p1s0f0"}
    (plugin,) = read_nccl(PLUGIN.splitlines())
    assert (plugin.network, [*plugin.devices]) == ("IBext_v10", ["rocep1s0f1"])


def test_as_the_file_meant():
    (found,) = judged(OWN, **ENV).values()
    assert (found.about, found.level) == ("nccl-took", Level.OK)
    expected = "rank 0: NCCL 2.29.7 took NET/IB over rocep1s0f0, roceP2p1s0f0; the ranks meet over "
    assert found.what == f"{expected}enp1s0f0np0"
    assert (
        found.source == "its own words: Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/2"
    )


DIFFERS = {  # log, env file → what is found, at which level, words of it
    "sockets": (
        SOCKET,
        ENV,
        "nccl-socket",
        Level.ERROR,
        "over ens7, not RoCE: NET/IB : No device",
    ),
    "meant": (
        SOCKET,
        {"NCCL_IB_DISABLE": "1"},
        "nccl-took",
        Level.OK,
        "NET/Socket over ens7",
    ),
    "value": (
        OWN,
        {"NCCL_IB_HCA": "=x"},
        "nccl-value",
        Level.ERROR,
        "and the env file has =x",
    ),
    "silent": (
        "INFO 11-22 vllm is up\n",
        ENV,
        "nccl-silent",
        Level.UNKNOWN,
        "no line of NCCL",
    ),
    "not said": (
        OWN.split("\n")[0] + "\n",
        ENV,
        "nccl-not-said",
        Level.UNKNOWN,
        "process 812",
    ),
    "alone": (
        OWN.replace("nranks 2", "nranks 1"),
        ENV,
        "nccl-alone",
        Level.NOTE,
        "one rank",
    ),
}


@pytest.mark.parametrize("name", DIFFERS)
def test_what_differs_from_the_file(name):
    text, meant, about, level, words = DIFFERS[name]
    found = judged(text, **meant)
    assert about in found, found
    assert (found[about].level, words in found[about].what) == (level, True), found[
        about
    ].what
    assert "nccl-took" not in found or len(found) == 1


def test_a_log_of_rubbish():
    lines = [
        "NCCL INFO " * 10_000,
        "\x00NCCL\xff",
        "a:1:1 [0] NCCL INFO " + "[9]" * 5000,
    ]
    lines += [f"h{n}:{n}:1 [0] NCCL INFO x" for n in range(10_000)]
    assert len(read_nccl(lines)) == 4096
