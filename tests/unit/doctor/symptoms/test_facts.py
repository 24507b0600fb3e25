"""Read what a log says of the machine that wrote it."""

import re

import pytest

from patchkit.doctor.symptoms.diagnosis import read_log

TORCH = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.02 GiB. GPU 0 "
RANK = "world_size=2 rank=1 local_rank={} distributed_init_method=tcp://10.0.0.1:4"
CAPABILITY = "Your Tesla T4 GPU has compute capability 7.5. You can use float16 instead"
MINIMUM = (
    "not supported for the current GPU. Minimum capability: 80. Current capability: "
)


@pytest.mark.parametrize(
    ("log", "target", "memory"),
    [
        ("GPU 0: NVIDIA GB10 (UUID: GPU-5b1f0c0e)", "gb10", "shared"),
        (
            "|   0  NVIDIA GB10               On  |   0000000F:01:00.0 Off |",
            "gb10",
            "shared",
        ),
        ("Found GPU0 NVIDIA GB10 which is of cuda capability 12.1.", "gb10", "shared"),
        (
            "Device capability 12.1 not supported, communicator is not available.",
            "gb10",
            "shared",
        ),
        ("GPU 0: Orin (nvgpu) (UUID: 1833c8b5)", None, "shared"),
        (
            "|   0  NVIDIA GeForce RTX 5090    On  |   00000000:01:00.0 Off |",
            "rtx50",
            "own",
        ),
        ("NVIDIA GeForce RTX 5090, 12.0, 610.43.02, 32607 MiB", "rtx50", "own"),
        (
            "NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible",
            "rtx50",
            "own",
        ),
        ("RTX 5090 (compute capability 12.0), driver 595", "rtx50", "own"),
        (
            "device_name=NVIDIA_RTX_PRO_6000_Blackwell_Workstation_Edition.json",
            "rtx50",
            "own",
        ),
        ("device_name=NVIDIA_A100-SXM4-80GB.json", "other", "own"),
        ("GPU 0: NVIDIA A10G (UUID: GPU-1)", "other", "own"),
        ("GPU 0: NVIDIA L40S (UUID: GPU-1)", "other", "own"),
        ("on device with capability (8, 6), which", None, "own"),
        (CAPABILITY, "other", "own"),
        (f"{MINIMUM}75.", "other", "own"),
        (f"{MINIMUM}87.", "other", "shared"),  # an Orin
        ("SymmMemCommunicator: Device capability 8.9 not supported", "other", "own"),
        (f"{TORCH}has a total capacity of 14.56 GiB of which", None, "own"),
        (f"{TORCH}has a total capacity of 119.67 GiB of which", None, "shared"),
        (f"{TORCH}has a total capacity of 139.80 GiB of which", None, "own"),
        ("Free memory on device (5.92/79.19 GiB) on startup is less than", None, "own"),
        (
            "Free memory on device cuda:0 (23.5/31.36 GiB) on startup is less",
            None,
            "own",
        ),
        (
            "Free memory on device cuda:0 (35.2/121.69 GiB) on startup is",
            None,
            "shared",
        ),
        (RANK.format(1), None, "own"),
        (RANK.format(0), None, "shared"),
        ('File "/venv/flash.cpython-312-x86_64-linux-gnu.so", line 1', None, "own"),
        ("requires GPUs with compute capability 8.0 or above", None, "shared"),
        (
            "Cannot use FA version 2: only on devices with compute capability >= 8",
            None,
            "shared",
        ),
        ("vLLM's docs name GB10, RTX 5090 and H100", None, "shared"),
        ("fine on my NVIDIA GeForce RTX 5090, not on the Spark", None, "shared"),
        ("NVIDIA GeForce RTX 5070 Ti with CUDA capability sm_120", "rtx50", "own"),
    ],
)
def test_the_device_is_told_by_what_programs_print(log, target, memory):
    facts = read_log([f"{log}\n".encode()], {}).facts
    assert (facts.get("target"), facts["gpu_memory"]) == (target, memory)


def test_a_device_that_a_user_only_mentions_is_none():
    log = b"GPU 0: NVIDIA GeForce RTX 5090 (UUID: GPU-1)\nThe same on an NVIDIA GB10 works.\n"
    assert read_log([log], {}).facts["target"] == "rtx50"


def test_two_devices_are_none():
    log = (
        b"GPU 0: NVIDIA GeForce RTX 5090 (UUID: GPU-1)\nGPU 1: Tesla T4 (UUID: GPU-2)\n"
    )
    facts = read_log([log], {}).facts
    assert ("target" in facts, facts["gpu_memory"]) == (False, "own")


def test_the_machine_tells_what_its_log_does_not():
    facts = read_log([b"nothing\n"], {"target": "gb10"}).facts
    assert (facts["target"], facts["gpu_memory"]) == ("gb10", "shared")


CARD = "Found GPU0 NVIDIA GeForce RTX 5090 which is of cuda capability 12.0.\n"
SPARK = "Found GPU0 NVIDIA GB10 which is of cuda capability 12.1.\n"
SHARED = "GB10|share (the memory|it)|shares|page cache|drop_caches|273"
SHARE = (
    "Free memory on device ({}/79.19 GiB) on startup is less than desired GPU memory "
)


@pytest.mark.parametrize(
    ("about", "line"),
    [
        (
            "free-memory",
            "ValueError: memory is less than desired GPU memory utilization",
        ),
        ("engine-core-failed", "RuntimeError: Engine core initialization failed."),
        ("engine-dead", "EngineDeadError: EngineCore encountered an issue."),
        (
            "worker-died",
            "Worker proc VllmWorker-0 died unexpectedly, shutting down executor.",
        ),
        (
            "oom-killer",
            "Out of memory: Killed process 4242 (VLLM::EngineCor) anon-rss:9kB",
        ),
        ("host-memory", "OSError: [Errno 12] Cannot allocate memory"),
        ("sleep-wake", "ERROR Invocation of wake_up method failed"),
        ("machine-stands-still", "Several times the machine froze (ssh dead)."),
        (
            "nvrm-no-memory",
            "NVRM: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x51)",
        ),
        ("slower-than-expected", "gpt-oss-120b: 24 tok/s instead of 50"),
        ("slow-in-words", "$ # Llama 70B serves at ~4 tok/s, slower than expected"),
        (
            "clock-stuck-low",
            "GPU clock stuck at approximately 702 MHz, even during inference",
        ),
        ("no-gpudirect", "NCCL INFO GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"),
        ("no-peermem", "modprobe: ERROR: could not insert 'nvidia_peermem'"),
        ("nvml-not-supported", "could not convert string to float: '[N/A]'"),
    ],
)
def test_what_holds_for_a_shared_memory_is_told_there_alone(about, line):
    def causes(start):
        diagnoses = read_log([f"{start}{line}\n".encode()], {}).diagnoses
        (causes,) = (row.causes for row in diagnoses if row.symptom.id == about)
        return causes

    assert causes(SPARK) == causes("")
    assert {cause.id for cause in causes(CARD)}.isdisjoint(
        {cause.id for cause in causes(SPARK) if "gpu_memory" in cause.when}
    )
    for cause in causes(CARD):
        assert not re.search(SHARED, f"{cause.cause} {cause.cure} {cause.command}")


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (
            f"{TORCH}has a total capacity of 14.56 GiB\n  in determine_available_memory",
            "first-batch",
        ),
        (f"{TORCH}has a total capacity of 119.67 GiB", "step-too-large"),
        (f"{TORCH}has a total capacity of 79.19 GiB\n in wake_up", "wake-up-taken"),
        (f"{TORCH}has a total capacity of 119.67 GiB\n in wake_up", "wake-up"),
    ],
)
def test_what_a_card_lacks_is_told_first(lines, cause):
    (diagnosis,) = read_log([f"{lines}\n".encode()], {}).diagnoses
    assert diagnosis.causes[0].id == cause


def test_a_part_that_is_slower_is_no_slow_server():
    line = "flashinfer is unavailable; the DFlash2 selector uses torch.topk, at half the speed."
    (diagnosis,) = read_log([line.encode()], {}).diagnoses
    assert (diagnosis.symptom.id, diagnosis.level) == ("slower-part", "note")
