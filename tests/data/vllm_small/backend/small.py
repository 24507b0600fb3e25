"""A build backend that compiles one library, step by step as ninja tells them."""

import json
import os
import subprocess
import sys
import sysconfig
import warnings
import zipfile
from pathlib import Path

STEPS = 3
# As CMake would write it for a library that tests leave out.
COMMAND = "nvcc -gencode arch=compute_90a,code=sm_90a -o CMakeFiles/other_C.dir/small.o"
COMMANDS = [{"file": "csrc/small.cu", "command": COMMAND}]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    warnings.warn("a word of the backend", stacklevel=1)
    build = Path("build/temp")
    build.mkdir(parents=True, exist_ok=True)
    (build / "compile_commands.json").write_text(json.dumps(COMMANDS))
    library = build / "small_C.abi3.so"
    for step in range(1, STEPS + 1):
        sys.stdout.write(f"[{step}/{STEPS}] Building CXX object small.{step}.o\n")
        sys.stdout.flush()
        compile_step(build / f"small.{step}.o")
    link = [os.environ["CXX"], "-shared", "-o", library, *sorted(build.glob("*.o"))]
    subprocess.run(link, check=True)
    # As upstream has FlashAttention 2: PTX alone.
    ptx = build / "ptx_C.abi3.so"
    how = ["-shared", "-cudart=none", "-Xcompiler=-fPIC", "-Xlinker=-s"]
    how += ["-gencode=arch=compute_80,code=compute_80"]
    nvcc = ["nvcc", "-ccbin", os.environ["CXX"], *how, "csrc/small.cu", "-o", ptx]
    subprocess.run(nvcc, check=True)
    return packed(Path(wheel_directory), library, ptx)


def compile_step(target):
    if target.exists():
        return
    command = [
        os.environ["CXX"],
        "-c",
        "-fPIC",
        f"-Danswer={target.name.replace('.', '_')}",
    ]
    subprocess.run([*command, "csrc/small.cpp", "-o", f"{target}.new"], check=True)
    Path(f"{target}.new").rename(target)


def packed(folder, *libraries):
    version = os.environ["VLLM_VERSION_OVERRIDE"]
    home = f"vllm-{version}.dist-info"
    # As setuptools: the platform of this machine, or of _PYTHON_HOST_PLATFORM.
    platform = sysconfig.get_platform().replace("-", "_")
    name = f"vllm-{version}-cp38-abi3-{platform}.whl"
    with zipfile.ZipFile(folder / name, "w") as bundle:
        bundle.writestr("vllm/__init__.py", Path("vllm/__init__.py").read_text())
        bundle.writestr("vllm/_version.py", f"__version__ = '{version}'\n")
        for library in libraries:
            bundle.write(library, f"vllm/{library.name}")
        bundle.writestr(
            f"{home}/METADATA",
            f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}\n",
        )
        tag = "Tag: cp38-abi3-linux_x\n"
        bundle.writestr(
            f"{home}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\n{tag}"
        )
        listed = "".join(f"{path},,\n" for path in bundle.namelist())
        bundle.writestr(f"{home}/RECORD", listed)
    return name
