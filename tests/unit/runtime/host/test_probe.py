"""Probe machines: Sparks and a Thor written from documented facts, and the one that runs this."""

import json
import os
import shutil
import tarfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patchkit.cli.runtime import probe as verb
from patchkit.cluster.agent.health import GpuState, GpuUser, gpu_state, gpu_users
from patchkit.errors import HostError, UsageError
from patchkit.records import read_json
from patchkit.runtime.host.advice import find_remarks
from patchkit.runtime.host.host import Gid, Gpu, Host, Memory, Software, System
from patchkit.runtime.host.probe import RecordingWriter, ToolUnavailable, probe
from support import hosts, write_files
from support.machine_files import write
from support.needed import need


def seen(root, **options):
    return probe(root, environment={}, **options)


def test_the_system_of_a_spark(machine):
    spark = machine("cable_port0", 1)
    assert spark.system == System(
        hostname="spark-2",
        vendor="NVIDIA",
        product="NVIDIA_DGX_Spark",
        bios="5.36_0ACUM018",
        bios_date="08/06/2025",
        kernel="6.17.0-1029-nvidia",
        os="Ubuntu 24.04.5 LTS",
        machine="aarch64",
        cpu="10 x Cortex-A725, 10 x Cortex-X925",
        cores=20,
    )
    assert spark.memory == Memory(
        total=127_600_748, available=121_000_000, swap_total=16_777_212
    )
    assert spark.gpus == (
        Gpu(
            name="NVIDIA GB10",
            capability="12.1",
            driver="580.173.02",
            bus="000f:01:00.0",
        ),
    )
    assert (spark.software, spark.notes) == (None, ())
    gids = next(each.gids for each in spark.rdma if each.name == "roceP2p1s0f0")
    kinds = {2: "IB/RoCE v1", 3: "RoCE v2"}
    address = "192.168.101.11"
    assert gids[2:] == tuple(
        Gid(index=n, kind=kinds[n], address=address) for n in kinds
    )


BOTH = ("both_cables", "ring", "two_in_one_subnet", "pair_and_switch", "two_switches")
CABLED = {
    **dict.fromkeys(("single", "cable_out", "thor", "link_down"), ()),
    **dict.fromkeys(("cable_port1", "wifi_managed"), (1,)),
    **dict.fromkeys(BOTH, (0, 1)),
}
REMARKS = {
    "no_rdma": ["no-rdma"],
    "wrong_mtu": ["twin-mtu"],
    "ipv6_only": ["no-address"],
    "same_subnet": ["same-subnet"],
    "link_local": ["link-local-twins"],
    "one_twin": ["one-twin-address"],
    "second_half_only": ["one-twin-address"],
    "random_twin": ["random-twin"],
    "two_in_one_subnet": ["shared-network", *["one-twin-address"] * 2],
    "switch_in_the_lan": ["shared-network", "one-twin-address"],
    "two_switches": ["one-twin-address", "one-twin-address"],
    "kernel7": ["kernel-reserve"],
    "single": ["no-connectx"],
    "bond": ["part-of-master"],
    "bridge": ["part-of-master"],
}


@pytest.mark.parametrize("name", hosts.NAMES)
def test_what_is_cabled_and_what_is_remarked(machine, name):
    found = machine(name)
    assert found.target == ("thor" if name == "thor" else "gb10")
    assert found.cabled == CABLED.get(name, (0,))
    assert [each.about for each in find_remarks(found)] == REMARKS.get(name, [])
    assert read_json(Host, json.dumps(asdict(found))) == found


@pytest.mark.parametrize(
    ("cma", "kernel", "cmdline", "said"),
    [
        ((0, 940_604), "7.0.0-1019-nvidia", "ro quiet", True),
        ((0, 940_604), "7.0.0-1019-nvidia", "ro kho=off", False),
        (
            (0, 940_604),
            "7.0.0-1019-nvidia",
            "kho=off kho=on",
            True,
        ),  # the last one counts
        ((0, 0), "7.0.0-1019-nvidia", "ro quiet", False),
        (
            None,
            "7.0.0-1019-nvidia",
            "ro quiet",
            True,
        ),  # as in a container, whose meminfo has less
        (None, "6.17.0-1032-nvidia", "ro quiet", False),
    ],
)
def test_a_kernel_that_keeps_a_reserve_where_rdma_registers(
    tmp_path, cma, kernel, cmdline, said
):
    machine = replace(
        hosts.MACHINES["cable_port0"](0), cma=cma, kernel=kernel, cmdline=cmdline
    )
    write(tmp_path, machine)
    for who in ("probe", "env", "verify"):
        found = [each.about for each in find_remarks(seen(tmp_path), who)]
        assert ("kernel-reserve" in found) is said


def test_a_half_that_is_down_is_missed_only_where_the_other_one_does_not_do(tmp_path):
    for speed, about in ((200_000, ["half-down"]), (100_000, [])):
        machine = hosts.MACHINES["cable_port0"](0)
        cards = {card.name: card for card in machine.cards}
        cards["enp1s0f0np0"] = replace(cards["enp1s0f0np0"], speed=speed)
        cards["enP2p1s0f0np0"] = replace(cards["enP2p1s0f0np0"], up=False, speed=-1)
        write(tmp_path / str(speed), replace(machine, cards=tuple(cards.values())))
        assert [
            each.about for each in find_remarks(seen(tmp_path / str(speed)))
        ] == about


def test_a_link_that_trained_with_half_its_lanes(copied):
    place = copied / "sys/class/net/enP2p1s0f0np0/device/current_link_width"
    place.write_text("2\n")
    assert (
        find_remarks(seen(copied))[0].what
        == "enP2p1s0f0np0 (0002:01:00.0) has 2 PCIe lanes, not 4"
    )


@pytest.mark.parametrize(
    ("cuda", "driver", "said"),
    [
        ("13.2", "580.173.02", ["595.45.04"]),
        ("13.2", "595.45.04", []),
        ("13.1", "580.173.02", ["590.44.01"]),
        ("13.0", "580.173.02", []),
        ("13.2", "570.86.15", []),  # which loads nothing of CUDA 13
        ("13.2", "unknown", []),
    ],
)
def test_a_driver_that_loads_code_of_torchs_cuda_but_not_its_ptx(
    machine, cuda, driver, said
):
    software = Software(python="/venv/bin/python", torch="2.15.0", cuda=cuda)
    gpus = (Gpu(name="NVIDIA GB10", capability="12.1", driver=driver),)
    found = find_remarks(replace(machine("cable_port0"), software=software, gpus=gpus))
    hints = [each.hint for each in found if each.about == "ptx-driver"]
    assert [hint.split()[-2] for hint in hints] == said


# GPUs


def test_how_the_first_gpu_is(tmp_path, monkeypatch):
    program = (
        "#!/bin/sh\ncase $1 in\n"
        "*apps*) echo 812, [N/A]; echo 977, 1024 ;;\n"
        "*) echo '36, 78.28, 345, 0, 0x0000000000000004' ;;\nesac\n"
    )
    write_files(tmp_path, {"nvidia-smi": program}, mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_state() == GpuState(36, 78.28, 345, 0, 4)
    assert gpu_users() == (GpuUser(pid=812), GpuUser(pid=977, mib=1024))
    program = "#!/bin/sh\necho 'Driver/library version mismatch'\nexit 18\n"
    (tmp_path / "nvidia-smi").write_text(program)
    with pytest.raises(ToolUnavailable, match="mismatch"):
        gpu_state()


# Broken machines


def test_what_is_odd_becomes_a_note(copied):
    for said in ("-1", "65535", "4294967295", "fast"):
        (copied / "sys/class/net/enP7s7/speed").write_text(f"{said}\n")
        assert seen(copied).netdev("enP7s7").speed is None
    (copied / "proc/sys/kernel/hostname").write_text("spark\x1b[2J\x07-1\n")
    place = copied / "commands/ip-address.json"
    place.write_text(place.read_text().replace("enP7s7", "eth7"))
    said = copied / "commands/nvidia-smi.csv"
    said.write_text("NVIDIA GB10, [N/A], 580.142, Not Supported, [Unknown Error]\n")
    assert seen(copied).gpus == (Gpu(name="NVIDIA GB10", driver="580.142"),)
    said.write_text("No devices were found\n")
    found = seen(copied)
    assert found.system.hostname == "spark [2J -1"
    assert found.notes == (
        "/sys/class/net/enP7s7/speed: 'fast' is not a number",
        "no GPU is found: nvidia-smi: what it says is not understood: 'No devices were found'",
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = hosts.build(tmp_path_factory.mktemp("broken"), "cable_port0")
    return root, sorted(each for each in root.rglob("*") if each.is_file())


@settings(deadline=None, max_examples=50, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_file_makes_probe_fail(files, data):
    root, places = files
    place = data.draw(st.sampled_from(places))
    right = place.read_bytes()
    wrong = st.binary(max_size=200) | st.sampled_from(
        [b"[" * 9999, b'[{"ifname":0}]', b"9" * 9999]
    )
    if data.draw(st.booleans()):
        place.write_bytes(data.draw(wrong))
    else:  # as where a driver is unloaded while its files are read
        place.unlink()
    try:
        found = seen(root)
        find_remarks(found)
        assert list(verb.host_lines(found))
        assert read_json(Host, json.dumps(asdict(found))) == found
    finally:
        place.write_bytes(right)


def test_a_recording_leads_nowhere_else(copied, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("6000\n")
    for path, target in (("mtu", secret), ("speed", "/dev/zero")):
        (copied / "sys/class/net/enP7s7" / path).unlink()
        (copied / "sys/class/net/enP7s7" / path).symlink_to(target)
    (copied / "proc/meminfo").unlink()
    os.mkfifo(copied / "proc/meminfo")
    found = seen(copied, copy=RecordingWriter(copied, tmp_path / "saved"))
    assert found.netdev("enP7s7").mtu == 0
    assert found.notes == (
        "/sys/class/net/enP7s7/mtu: leads out of the recording",
        "/sys/class/net/enP7s7/speed: leads out of the recording",
        "/proc/meminfo: is not a regular file",
    )
    assert (tmp_path / "saved/notes.txt").read_text() == "\n".join([*found.notes, ""])
    assert replace(seen(tmp_path / "saved"), notes=found.notes) == found


# This machine


def test_this_machine_saved_packed_and_unpacked(tmp_path):
    found = probe(environment={}, copy=RecordingWriter(Path("/"), tmp_path / "saved"))
    assert "lo" in [each.name for each in found.netdevs]
    with tarfile.open(tmp_path / "saved.tar", "w") as archive:
        archive.add(tmp_path / "saved", "elsewhere")
    shutil.rmtree(tmp_path / "saved")
    with tarfile.open(tmp_path / "saved.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    notes = found.notes
    again = replace(seen(tmp_path / "elsewhere"), notes=notes)
    assert again == replace(found, software=None)


def test_what_is_no_recording_is_refused(tmp_path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(UsageError, match="not empty"):
        RecordingWriter(Path("/"), tmp_path)


def test_this_machine_has_addresses_if_ip_is_here(tmp_path, monkeypatch):
    need("ip")
    found = probe(environment={}).netdev("lo").addresses
    assert ("127.0.0.1", 8) in [(each.address, each.prefix) for each in found]
    monkeypatch.setenv("PATH", str(tmp_path))
    notes = probe(environment={}).notes
    assert any(
        "no addresses: ip: " in note and "install iproute2" in note for note in notes
    )


def test_a_python_that_does_not_start(tmp_path):
    """A note where it was found by chance, an error where it was asked for."""
    broken = (
        write_files(tmp_path, {"python3": "#!/bin/sh\nexit 3\n"}, mode=0o755)
        / "python3"
    )
    found = probe(environment={"PATH": str(tmp_path)})
    assert found.software is None
    assert found.notes[-1].startswith(
        f"no Python tells what is installed: {broken}: exit code 3"
    )
    with pytest.raises(HostError, match="exit code 3"):
        probe(python=str(broken), environment={})


def test_the_command(cli, copied, tmp_path):
    shown = cli("probe", "--root", copied, "--save", tmp_path / "saved")
    assert "NVIDIA GB10, capability 12.1" in shown.stdout
    assert "cage 0 (next to the RJ45 port)" in shown.stdout
    again = cli("probe", "--json", "--root", tmp_path / "saved").stdout
    assert read_json(Host, again) == seen(copied)
    assert "is not a machine root" in cli("probe", "--root", tmp_path, rc=3).stderr
