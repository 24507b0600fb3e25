"""Wheels for one device and nodes with another: native ones are refused, others told of."""

import pytest

from patchkit.cluster.agent.installation import NodeWheel, WheelLock
from patchkit.cluster.launch.install import device_note, require_devices
from patchkit.errors import HostError
from patchkit.runtime.host.host import Gpu

GB10 = Gpu(name="NVIDIA GB10", capability="12.1")
THOR = Gpu(name="NVIDIA Thor", capability="11.0")
RENAMED = Gpu(name="NVIDIA Thor", capability="10.1")  # by an older driver
OTHER = Gpu(name="NVIDIA L4", capability="8.9")
WHEEL = "vllm-0.33.0+cu130.gb10-cp38-abi3-manylinux_2_28_aarch64.whl"


def lock(target="", native=()):
    wheel = NodeWheel(name=WHEEL, sha256="0" * 64, unpacked=1)
    return WheelLock(
        requirements="",
        cpu="aarch64",
        python="3.12",
        wheels=(wheel,),
        target=target,
        native=native,
    )


@pytest.mark.parametrize(
    ("target", "gpu", "says"),
    [
        ("gb10", GB10, ""),
        ("thor", RENAMED, ""),
        ("gb10", None, ""),
        ("", THOR, ""),
        ("gb10", THOR, "NVIDIA Thor (11.0) is no gb10, for which the wheels were made"),
        ("gb10", OTHER, "NVIDIA L4 (8.9) is no gb10, for which the wheels were made"),
    ],
)
def test_a_device_that_wheels_were_not_made_for_is_told(target, gpu, says):
    assert device_note(lock(target=target), gpu) == says


def test_native_wheels_go_to_no_other_device():
    devices = {"spark-1": GB10, "thor-1": THOR}
    require_devices(lock(target="gb10"), devices)
    require_devices(
        lock(target="gb10", native=("vllm==0.33.0",)), {"spark-1": GB10, "laptop": None}
    )
    with pytest.raises(HostError, match=r"^thor-1: NVIDIA Thor") as caught:
        require_devices(lock(target="gb10", native=("vllm==0.33.0",)), devices)
    assert "repack vllm==0.33.0 --dir wheelhouse-any " in caught.value.hint
