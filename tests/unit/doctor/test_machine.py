"""A machine that is well, each thing that can be wrong with it, and what cannot be looked at."""

import subprocess
from dataclasses import replace

import pytest

from patchkit.cluster.agent import health
from patchkit.cluster.agent.health import (
    Compilers,
    ContainerLimits,
    GpuState,
    GpuUser,
    NodeHealth,
)
from patchkit.cluster.agent.image_facts import ImageFacts
from patchkit.doctor.examination import Examination
from patchkit.doctor.first_use import add_first_use, check_first_use
from patchkit.doctor.installed_code import DeviceCodeFound, look_at_device_code
from patchkit.doctor.machine import check_flashinfer, machine_findings
from patchkit.doctor.peers.node_report import (
    NodeReport,
    facts_for_causes,
    placed_files,
)
from patchkit.finding import Level
from patchkit.runtime.host.host import FlashInfer, Gpu, Software
from patchkit.runtime.host.probe import probe
from patchkit.runtime.python.distributions import Owner
from support import clusters, hosts
from support.clusters import image_facts
from support.vllm_wheels import LIBRARIES

GPU = GpuState(50, 60.0, 2400, 95, 0)
COMPILERS = Compilers(
    compiler="/usr/bin/gcc", python_h="/usr/include/python3.12/Python.h"
)
OUTSIDE = ContainerLimits(kind="", verbs=4, verbs_open=4)
IN_DOCKER = replace(OUTSIDE, kind="docker")
WELL = NodeHealth(
    page_cache=1 << 20,
    kernel=(),
    gpu=GPU,
    gpu_users=(GpuUser(pid=10, name="VLLM::EngineCor", user="spark", mib=90_000),),
    manager=True,
    process=health.ProcessLimits(),
    unit=health.ProcessLimits(),
    container=OUTSIDE,
    compilers=COMPILERS,
)
SOFTWARE = Software(
    python="/venv/bin/python",
    vllm="0.25.1",
    torch="2.11.0+cu130",
    triton="3.6.0",
    cuda="13.0",
    flashinfer=FlashInfer(
        version="", modules=("sampling",), facts={"nvcc": "/usr/bin/nvcc"}
    ),
)
STAMP = "2026-11-23T03:00:00+0000 s kernel: "
XID = f"{STAMP}NVRM: Xid (PCI:000f): 79, GPU has fallen off the bus."


@pytest.fixture(scope="module")
def well(tmp_path_factory):
    _, (head, _worker) = clusters.reports(tmp_path_factory.mktemp("nodes"))
    report = with_host(replace(head, health=WELL), software=SOFTWARE)
    return replace(report, facts=replace(report.facts, venv="/venv"))


def with_health(report, **changes):
    return replace(report, health=replace(report.health, **changes))


def wrong(findings):
    return {
        each.about: each
        for each in findings
        if each.level in (Level.ERROR, Level.WARNING)
    }


def with_host(report, **changes):
    facts = replace(report.facts, host=replace(report.facts.host, **changes))
    return replace(report, facts=facts)


def with_memory(report, **changes):
    return with_host(report, memory=replace(report.facts.host.memory, **changes))


def with_torch_nccl(report):
    nccl = {**report.contents.nccl, "torch": ("2.30.7", "d" * 64)}
    return replace(report, contents=replace(report.contents, nccl=nccl))


def test_a_machine_that_is_well_is_fine_in_all(well):
    found = [*machine_findings(well)]
    assert [each for each in found if each.level is not Level.OK or not each.what] == []
    assert len({each.about for each in found}) == len(found)


def with_kernels(report, **changes):
    kernels = replace(SOFTWARE.flashinfer, **changes)
    return with_host(report, software=replace(SOFTWARE, flashinfer=kernels))


def test_modules_that_the_next_start_compiles(well):
    files = {"group.json": '{"modules": "sampling xqa_input_*_False_*"}'}
    placed = placed_files(files, "vllm.service")
    assert placed.modules == "sampling xqa_input_*_False_*"

    (note,) = check_flashinfer(replace(well, placed=placed))
    assert (note.level, note.about) == (Level.NOTE, "flashinfer-modules")
    assert note.what == "FlashInfer compiles at the next start: xqa_input_*_False_*"

    there = with_kernels(well, modules=("sampling", "xqa_input_a_False_b"))
    (fine,) = check_flashinfer(replace(there, placed=placed))
    assert fine.level is Level.OK


MISMATCH = {"gpu": "nvmlInit_v2: error 18: Driver/library version mismatch"}
OTHER = GpuUser(pid=4711, name="python3", mib=19135)
OLD = Gpu(name="NVIDIA GB10", capability="12.1", driver="570.86.15")
FAULTS = {
    "gpu-throttled": lambda well: with_health(
        well, gpu=replace(GPU, throttled=0x40, celsius=95)
    ),
    "gpu-stuck": lambda well: with_health(
        well, gpu=replace(GPU, mhz=799, watts=19.5, busy=96)
    ),
    "gpu-mismatch": lambda well: with_health(
        well, gpu=None, gpu_users=None, unread=MISMATCH
    ),
    "gpu-others": lambda well: with_health(well, gpu_users=(*WELL.gpu_users, OTHER)),
    "gpu-off-the-bus": lambda well: with_health(well, kernel=(XID,)),
    "container-rdma": lambda well: with_health(
        well, container=replace(IN_DOCKER, verbs_open=0)
    ),
    "rdma-closed": lambda well: with_health(
        well, container=replace(OUTSIDE, verbs_open=1)
    ),
    "compiler": lambda well: with_health(well, compilers=Compilers(python_h="x")),
    "python-header": lambda well: with_health(well, compilers=Compilers(compiler="x")),
    "memory-left": lambda well: with_memory(well, available=4 << 20),
    "driver": lambda well: with_host(well, gpus=(OLD,)),
    "torch-cpu": lambda well: with_host(well, software=replace(SOFTWARE, cuda="")),
    "torch-other": lambda well: with_host(
        well, software=replace(SOFTWARE, vllm="0.19.1+cu129")
    ),
    "nccl-two": with_torch_nccl,
    "flashinfer": lambda well: with_kernels(well, facts={}),
}


@pytest.mark.parametrize("about", FAULTS)
def test_each_fault_is_found_and_nothing_else(well, about):
    found = wrong(machine_findings(FAULTS[about](well)))
    assert list(found) == [about]
    assert found[about].where == "spark-1"
    assert found[about].hint
    assert "{" not in found[about].what + found[about].why.replace("{}", "")


MADE = {"spec": "/etc/cdi/nvidia.yaml", "driver": "570.86.15"}
STALE = "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"


@pytest.mark.parametrize(
    ("engine", "changes", "about", "cure"),
    [
        ("docker", {}, [], ""),
        ("docker", {"spec": "", "hook": True}, [], ""),
        ("podman", {"driver": ""}, [], ""),
        (
            "docker",
            {"spec": ""},
            ["engine-hook"],
            "--runtime=docker && systemctl restart docker",
        ),
        ("podman", {"spec": "", "hook": True}, ["engine-gpu"], STALE),
        ("podman", MADE, ["cdi-stale"], STALE),
        (
            "docker",
            {"driver": "570.1"},
            ["cdi-stale"],
            "systemctl restart nvidia-cdi-refresh.serv",
        ),
        (
            "docker",
            {"closed": ("/dev/infiniband/uverbs0",)},
            ["engine-rdma"],
            "sudo chmod a+rw",
        ),
        ("docker", {"cpu": "amd64"}, ["image-cpu"], "patchkit cluster install"),
    ],
)
def test_what_containers_of_a_node_lack(well, engine, changes, about, cure):
    """The Python of the machine is not judged."""
    gpu = replace(well.facts.host.gpus[0], driver="580.95.05")
    served = with_host(well, gpus=(gpu,), software=replace(SOFTWARE, vllm=""))
    facts = replace(served.facts, image=image_facts(engine, **changes))
    found = [*machine_findings(replace(served, facts=facts))]
    assert [*wrong(found)] == about
    assert all(cure in each.hint for each in wrong(found).values())
    names = {each.about for each in found}
    assert names >= {"engine", "driver"}
    assert not names & {"torch-cpu", "compiler"}
    silent = replace(
        served, facts=replace(facts, image=ImageFacts(problem="engine-missing"))
    )
    unknown = {
        each.about for each in machine_findings(silent) if each.level is Level.UNKNOWN
    }
    assert unknown >= {"engine", "engine-gpu", "engine-rdma", "image-cpu"}


PIP = "pip install --force-reinstall --no-deps nvidia-nccl-cu13==2.30.7"


@pytest.mark.parametrize(
    ("placed", "cure"), [(False, PIP), (True, "patchkit cluster install")]
)
def test_a_library_that_is_gone_comes_with_what_brings_it_back(well, placed, cure):
    file = Owner(path="/v/libnccl.so.2", project="nvidia-nccl-cu13", version="2.30.7")
    contents = replace(well.contents, lost=(file,), nccl={})
    report = replace(well, contents=contents, placed=well.placed if placed else None)
    found = next(each for each in machine_findings(report) if each.about == "nccl-lost")
    assert found.level is Level.ERROR
    assert "/v/libnccl.so.2, which nvidia-nccl-cu13 2.30.7 has installed" in found.what
    assert cure in found.hint


def test_what_is_only_worth_knowing(well):
    stopped = with_memory(replace(well, processes=()), available=20 << 20, swap_total=0)
    found = [*machine_findings(stopped)]
    notes = {each.about: each for each in found if each.level is Level.NOTE}
    assert {*notes} == {"gpu-taken"}
    assert wrong(found) == {}
    assert "10 (VLLM::EngineCor of spark 90000 MiB)" in notes["gpu-taken"].what


def test_what_nobody_read_is_never_fine(well):
    """Of nothing known, nothing is fine but what the other facts show."""
    unread = {"kernel": "only root may", "gpu": "no NVML"}
    nothing = replace(
        well, health=NodeHealth(unread=unread), processes=None, contents=None
    )
    nothing = with_host(nothing, software=None, memory=None, gpus=())
    found = {each.about: each for each in machine_findings(nothing)}
    assert {each.level for each in found.values()} == {Level.UNKNOWN}
    assert all(each.what.startswith("not checked: ") for each in found.values())
    assert "dmesg" in found["kernel-log"].hint
    assert found["gpu-throttled"].what == "not checked: no GPU is found here: no NVML"


@pytest.mark.parametrize("kind", ["kernel7", "kernel7_mended", "thor", "missing_files"])
def test_machines_and_the_facts_that_causes_hang_on(tmp_path, kind):
    facts = clusters.node_facts(tmp_path, node=0)
    host = probe(
        hosts.build(tmp_path / kind, kind, node=0), python=None, environment={}
    )
    report = NodeReport(
        node="spark-1", facts=replace(facts, host=host), health=WELL, processes=()
    )
    assert wrong(machine_findings(report)) == {}
    if kind.startswith("kernel7"):
        known = facts_for_causes(report)
        assert known["kernel_reserve"] == ("yes" if kind == "kernel7" else "no")
        assert known["target"] == "gb10"


def test_facts_of_which_nobody_is_sure_are_left_out(well):
    known = facts_for_causes(well)
    assert (known["memlock"], known["page_cache"], known["container"]) == (
        "unlimited",
        "small",
        "no",
    )
    silent = facts_for_causes(replace(well, health=NodeHealth()))
    assert not {"memlock", "container", "page_cache"} & silent.keys()
    assert "target" not in facts_for_causes(with_host(well, gpus=()))


# What a device compiles at its first use, by real libraries


def test_libraries_of_ptx_alone_are_compiled_unless_the_cache_is_filled(tmp_path):
    _, (head, _worker) = clusters.reports(tmp_path)
    cache = tmp_path / "cache"
    said = look_at_device_code(str(LIBRARIES), 0, str(cache))
    (note,) = check_first_use(head, said)
    assert (note.level, f"{cache} is empty" in note.what) == (Level.NOTE, True)
    assert (
        "default.so (2), modes.so (1) hold fat binaries that are PTX alone" in note.what
    )
    assert "patchkit repack vllm==0.25.1 --native" in note.hint
    native = {"a.so": {"sm_121": 2}, "b.so": {"kind \n5_": 1, "lto_90": 1}}
    for others in ({"kept": 3 << 20}, {"codes": native}):
        (fine,) = check_first_use(head, replace(said, **others))
        assert fine.level is Level.OK
    examination = Examination(
        findings=(), reports=(head,), lines=()
    )  # its Python is none of this machine's
    (found,) = add_first_use(examination).findings
    assert (found.level, found.what) == (
        Level.UNKNOWN,
        "not checked: no Python with vLLM is known",
    )


def test_the_variables_of_a_process_count(tmp_path):
    variables = {"CUDA_FORCE_PTX_JIT": "1", "CUDA_CACHE_PATH": str(tmp_path)}
    words, pipe = ["/bin/sh", "-c", "echo; read end"], subprocess.PIPE
    with subprocess.Popen(words, env=variables, stdin=pipe, stdout=pipe) as process:
        process.stdout.readline()  # its variables can be read from then on
        found = look_at_device_code(str(tmp_path), process.pid, "~/none")
        process.communicate()
    assert found == DeviceCodeFound(
        codes={}, cache=str(tmp_path), kept=0, forced="CUDA_FORCE_PTX_JIT"
    )
    _, (head, _worker) = clusters.reports(tmp_path)
    assert [its.about for its in check_first_use(head, found)] == ["ptx-forced"]
