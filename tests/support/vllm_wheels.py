"""Small wheels of vLLM, as upstream builds them: real libraries, and Python that a fix knows."""

import hashlib
import zipfile
from pathlib import Path

from patchkit.patching.recipe import load_recipe
from support.wheels import record

LIBRARIES = Path(__file__).parents[1] / "data" / "libraries"
VERSION = "0.19.1"
FIX = "marlin_w4a8_fp8"
NAME = f"vllm-{VERSION}-cp38-abi3-manylinux_2_28_aarch64.whl"
PATCHED = load_recipe("vllm").fix(FIX).examples[0]
LOST, HOPPER, STOCK = (
    (LIBRARIES / f"{n}.so").read_bytes() for n in ("lost", "hopper", "stock")
)
KERNELS = {
    "vllm/_C.abi3.so": LOST,
    "vllm/_C_stable_libtorch.abi3.so": STOCK,
    "vllm/_moe_C.abi3.so": STOCK,
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": HOPPER,
}
# What fixes look at, and what the release's own code imports from there.
_PACKAGED = (
    *("envs.py", "_custom_ops.py", "config/*.py", "platforms/*.py", "utils/*.py"),
    *("engine/arg_utils.py", "model_executor/model_loader/weight_utils.py"),
    "distributed/device_communicators/shm_broadcast.py",
    *("model_executor/kernels/**/*.py", "model_executor/layers/quantization/**/*.py"),
    *(
        "model_executor/layers/fused_moe/**/*.py",
        "model_executor/layers/fused_moe/configs/*.json",
    ),
)
_VERSION_FILE = f"""\
# made by a tool
version: str
version_tuple: tuple[int | str, ...]

__version__ = version = '{VERSION}'
__version_tuple__ = version_tuple = (0, 19, 1)

__commit_id__ = commit_id = 'gb1388b1fb'
"""

# What the fix's proof asks of a device, as the release has it.
_PLATFORM = """\
class Platform:
    def is_device_capability(self, capability):
        have = self.get_device_capability()
        return have.major * 10 + have.minor == capability


class DeviceCapability(NamedTuple):
    major: int
    minor: int
"""
_CUDA = "class CudaPlatformBase(Platform):\n    pass\n"


def python_of(root):
    """The members of a release's wheel that fixes are about."""
    return {
        str(place.relative_to(root)): place.read_bytes()
        for pattern in _PACKAGED
        for place in root.glob(f"vllm/{pattern}")
    }


def vllm_wheel(
    folder,
    *,
    version=VERSION,
    name="",
    change=None,
    libraries=None,
    method=zipfile.ZIP_DEFLATED,
):
    """Write the wheel; ``change`` may spoil its members before RECORD is made."""
    home = f"vllm-{version}.dist-info"
    members = {
        "vllm/__init__.py": b"from vllm._version import __version__\n",
        "vllm/_version.py": _VERSION_FILE.encode(),
        PATCHED.path: PATCHED.before.encode(),
        "vllm/platforms/interface.py": f"from typing import NamedTuple\n\n\n{_PLATFORM}".encode(),
        "vllm/platforms/cuda.py": f"from .interface import Platform\n\n\n{_CUDA}".encode(),
        **(KERNELS if libraries is None else libraries),
        f"{home}/licenses/LICENSE": b"Apache-2.0\n" * 1000,
        f"{home}/sboms/upstream.cdx.json": b"{}\n",
        f"{home}/METADATA": f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}\n"
        "License-Expression: Apache-2.0\nRequires-Dist: torch==2.10.0\n\n"
        "Version: not this one\n".encode(),
        # Upstream's file names are changed after the build, and WHEEL is left as it was.
        f"{home}/WHEEL": b"Wheel-Version: 1.0\nGenerator: setuptools (80.10.2)\n"
        b"Root-Is-Purelib: false\nTag: cp38-abi3-linux_aarch64\n\n",
    }
    if change:
        change(members)
    members[f"{home}/RECORD"] = record(home, members)
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / (name or NAME.replace(VERSION, version))
    with zipfile.ZipFile(place, "w") as archive:
        for path, data in members.items():
            info = zipfile.ZipInfo(path, (2024, 5, 6, 7, 8, 10))
            info.external_attr = (0o100755 if path.endswith(".so") else 0o100644) << 16
            archive.writestr(info, data, method)
    return place


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()
