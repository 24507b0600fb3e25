"""Read which network NCCL took, from logs of several releases, and compare it with an env file."""

# ruff: noqa: E501 - lines of logs as they are

import pytest

from patchkit.doctor.nccl_lines import nccl_findings, read_nccl
from patchkit.finding import Level

# HPC-X's plugin below Ray: mark-ramsey-ri/vllm-dgx-spark #1; lines between these are left out.
PLUGIN = """\
(EngineCore_DP0 pid=2301) (RayWorkerWrapper pid=2981, ip=169.254.28.198) spark-3995:2981:2981 [0] NCCL INFO NET/IB : Made virtual device [0] name=rocep1s0f1 speed=200000 ndevs=1
(EngineCore_DP0 pid=2301) (RayWorkerWrapper pid=2981, ip=169.254.28.198) spark-3995:2981:3113 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [send] via NET/IBext_v10/0
"""
# Forms of NCCL 2.29.7's own sources, with the names of a Spark.
OWN = """\
\x1b[36mspark-1:812:812 [0] NCCL INFO Bootstrap: Using enp1s0f0np0:169.254.10.1<0>\x1b[0m
spark-1:812:812 [0] NCCL INFO NCCL version 2.29.7+cuda13.0
spark-1:812:901 [0] NCCL INFO NCCL_IB_HCA set to =rocep1s0f0,roceP2p1s0f0
spark-1:812:901 [0] NCCL INFO NET/IB : Using [0]rocep1s0f0:1/RoCE [1]roceP2p1s0f0:1/RoCE [RO]; OOB enp1s0f0np0:169.254.10.1<0>
spark-1:812:901 [0] NCCL INFO Initialized NET plugin IB
spark-1:812:901 [0] NCCL INFO Using network IB
spark-1:812:901 [0] NCCL INFO [Rank 0] ncclCommInitRankConfig comm 0xb rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId f01000 commId 0x1 - Init START
spark-1:812:901 [0] NCCL INFO NET/IB : Made virtual device [2] name=rocep1s0f0+roceP2p1s0f0 speed=400000 ndevs=2
spark-1:812:903 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/2
spark-1:812:903 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/2
"""
# NVIDIA/nccl #1267 and #1232, of 2.19.
SOCKET = """\
instance-8g-96c-3:2744870:2744870 [0] NCCL INFO Bootstrap : Using ens7:10.128.0.32<0>
NCCL version 2.19.3+cuda12.3
instance-8g-96c-3:2744870:2745046 [0] NCCL INFO NET/IB : No device found.
instance-8g-96c-3:2744870:2745046 [0] NCCL INFO NET/Socket : Using [0]ens7:10.128.0.32<0>
instance-8g-96c-3:2744870:2745046 [0] NCCL INFO Using network Socket
instance-8g-96c-3:2744870:2745046 [0] NCCL INFO comm 0x55f08a1c83d0 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 30 commId 0x438c8edb9fb0064f - Init START
instance-8g-96c-3:2744870:2745046 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
"""
ENV = {"NCCL_IB_HCA": "=rocep1s0f0,roceP2p1s0f0", "NCCL_SOCKET_IFNAME": "=enp1s0f0np0"}


def judged(text, **meant):
    return {
        each.about: each for each in nccl_findings("spark-1", read_nccl(text.splitlines()), meant)
    }


def test_what_a_log_says():
    (rank,) = read_nccl(OWN.splitlines())
    assert (rank.name, rank.ranks, rank.network) == ("rank 0", 2, "IB")
    assert (rank.said["version"], rank.said["bootstrap"]) == ("2.29.7", "enp1s0f0np0")
    assert [*rank.devices] == ["rocep1s0f0", "roceP2p1s0f0"]
    assert rank.settings == {"NCCL_IB_HCA": "=rocep1s0f0,roceP2p1s0f0"}
    (plugin,) = read_nccl(PLUGIN.splitlines())
    assert (plugin.network, [*plugin.devices]) == ("IBext_v10", ["rocep1s0f1"])


def test_as_the_file_meant():
    (found,) = judged(OWN, **ENV).values()
    assert (found.about, found.level) == ("nccl-took", Level.OK)
    expected = "rank 0: NCCL 2.29.7 took NET/IB over rocep1s0f0, roceP2p1s0f0; the ranks meet over "
    assert found.what == f"{expected}enp1s0f0np0"
    assert found.source == "its own words: Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/2"


DIFFERS = {  # log, env file → what is found, at which level, words of it
    "sockets": (SOCKET, ENV, "nccl-socket", Level.ERROR, "over ens7, not RoCE: NET/IB : No device"),
    "meant": (SOCKET, {"NCCL_IB_DISABLE": "1"}, "nccl-took", Level.OK, "NET/Socket over ens7"),
    "value": (OWN, {"NCCL_IB_HCA": "=x"}, "nccl-value", Level.ERROR, "and the env file has =x"),
    "silent": ("INFO 11-22 vllm is up\n", ENV, "nccl-silent", Level.UNKNOWN, "no line of NCCL"),
    "not said": (OWN.split("\n")[0] + "\n", ENV, "nccl-not-said", Level.UNKNOWN, "process 812"),
    "alone": (OWN.replace("nranks 2", "nranks 1"), ENV, "nccl-alone", Level.NOTE, "one rank"),
}


@pytest.mark.parametrize("name", DIFFERS)
def test_what_differs_from_the_file(name):
    text, meant, about, level, words = DIFFERS[name]
    found = judged(text, **meant)
    assert about in found, found
    assert (found[about].level, words in found[about].what) == (level, True), found[about].what
    assert "nccl-took" not in found or len(found) == 1


def test_a_log_of_rubbish():
    lines = ["NCCL INFO " * 10_000, "\x00NCCL\xff", "a:1:1 [0] NCCL INFO " + "[9]" * 5000]
    lines += [f"h{n}:{n}:1 [0] NCCL INFO x" for n in range(10_000)]
    assert len(read_nccl(lines)) == 4096
