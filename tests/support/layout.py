"""torch, vLLM and libnccl in small: laid out, linked and preloaded as in their wheels.

The libraries are real ones, for the real dynamic loader; each libnccl says another version, so
whoever calls it tells which one was taken.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from types import SimpleNamespace

from support import run_program, write_files
from support.needed import need

# What lies where, and the version that it says.
VERSIONS = {"stock": 22907, "custom": 23007, "third": 22809, "second site": 22205}
RPATH = "$ORIGIN/../../nvidia/cu13/lib:$ORIGIN/../../nvidia/nccl/lib:$ORIGIN"
NCCL = """
int ncclGetVersion(int *version) { *version = %d; return 0; }
const char text[] = "NCCL version %s+cuda13.0";
"""
TORCH = """
int ncclGetVersion(int *);
int torch_nccl(void) { int version; ncclGetVersion(&version); return version; }
"""
TORCH_INIT = """
import ctypes, glob, os, sys

def _preload_cuda_deps():
    for folder, pattern in [
        ("cuda_runtime", "libcudart.so.*[0-9]"),
        ("nccl", "libnccl.so.*[0-9]"),
        ("nvshmem", "libnvshmem_host.so.*[0-9]"),
    ]:
        found = []
        for entry in sys.path:
            for place in (f"nvidia/{folder}", "nvidia/cu13", folder):
                found += glob.glob(os.path.join(entry, place, "lib", pattern))
            if found:
                break
        if not found:
            raise ValueError(pattern)
        ctypes.CDLL(found[0])

here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib")
ctypes.CDLL(f"{here}/libtorch_global_deps.so", mode=ctypes.RTLD_GLOBAL)
try:
    if "libcudart.so" in open("/proc/self/maps").read():
        _preload_cuda_deps()
except Exception:
    pass
nccl = ctypes.CDLL(f"{here}/libtorch_python.so").torch_nccl
"""
VERSION = "__version__ = '2.13.0'\ncuda: Optional[str] = %s\ngit_version = '0'\n"
PROBE = """
import ctypes, json, os
import torch

answer = {"torch": torch.nccl(), "vllm": None}
version = ctypes.c_int()
try:
    library = ctypes.CDLL(os.environ.get("VLLM_NCCL_SO_PATH") or "libnccl.so.2")
    library.ncclGetVersion(ctypes.byref(version))
    answer["vllm"] = version.value
except OSError:
    pass
with open("/proc/self/maps") as maps:
    paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/" in line}
answer["mapped"] = sorted(path for path in paths if b"NCCL version " in open(path, "rb").read())
print(json.dumps(answer))
"""


def link(
    place, source="", *, soname=None, needs=(), path=RPATH, tags="--disable-new-dtags"
):
    """Compile a shared library that needs others; by default with DT_RPATH, as torch's."""
    need("gcc")
    place.parent.mkdir(parents=True, exist_ok=True)
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-O0",
        "-x",
        "c",
        "-",
        "-x",
        "none",
        "-o",
        place,
    ]
    command += [f"-Wl,-soname,{soname}"] if soname else []
    if needs:
        command += [
            "-Wl,--no-as-needed",
            *needs,
            f"-Wl,{tags},-rpath,{path}",
            "-Wl,--allow-shlib-undefined",
        ]
    subprocess.run(list(map(str, command)), input=source, text=True, check=True)
    return place


def compiled(home):
    """libnccl by name, and torch's libraries by the kind of their path."""
    nccl = {}
    for name, version in VERSIONS.items():
        dotted = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
        place = home / name / "libnccl.so.2"
        nccl[name] = link(place, NCCL % (version, dotted), soname="libnccl.so.2")
    cudart = link(home / "libcudart.so.13", soname="libcudart.so.13")
    torch = {}
    for kind, tags in (
        ("rpath", "--disable-new-dtags"),
        ("runpath", "--enable-new-dtags"),
    ):
        lib = home / kind
        cuda = link(
            lib / "libtorch_cuda.so",
            TORCH,
            needs=[nccl["stock"]],
            soname="libtorch_cuda.so",
            tags=tags,
        )
        link(
            lib / "libtorch_python.so",
            needs=[cuda],
            soname="libtorch_python.so",
            tags=tags,
        )
        link(lib / "libtorch_global_deps.so", needs=[cudart], tags=tags)
        torch[kind] = lib
    return SimpleNamespace(nccl=nccl, cudart=cudart, torch=torch, home=home)


class Environment:
    """A venv with torch and pip's libnccl, and what a user has set."""

    def __init__(self, parts, tmp_path):
        self.parts, self.home = parts, tmp_path
        venv.create(tmp_path / "venv", with_pip=False)
        self.python = str(tmp_path / "venv/bin/python")
        self.site = next((tmp_path / "venv/lib").glob("python*/site-packages"))
        self.variables = {}
        self.put("stock", self.pip_copy)
        self.place(parts.cudart, self.site / "nvidia/cu13/lib/libcudart.so.13")
        about = "from typing import Optional\n\n__all__ = []\ncuda: Optional[str] = '13.0'\n"
        write_files(
            self.site / "torch", {"__init__.py": TORCH_INIT, "version.py": about}
        )
        self.torch("rpath")

    @property
    def pip_copy(self):
        return self.site / "nvidia/nccl/lib/libnccl.so.2"

    def place(self, source, target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        shutil.copy(source, target)
        return target

    def put(self, name, target=None):
        """A libnccl somewhere; its path as text."""
        return str(
            self.place(
                self.parts.nccl[name], target or self.home / name / "libnccl.so.2"
            )
        )

    def torch(self, kind):
        for library in self.parts.torch[kind].iterdir():
            self.place(library, self.site / "torch/lib" / library.name)

    def without_preload(self):
        """As where CUDA's runtime did not come from pip: the list of torch ends before NCCL."""
        init = self.site / "torch/__init__.py"
        init.write_text(
            TORCH_INIT.replace("libcudart.so.*", "libcudart_of_nobody.so.*")
        )

    def inherited(self):
        wanted = {
            key: value for key, value in os.environ.items() if key in ("PATH", "HOME")
        }
        return {**wanted, **self.variables}

    def run(self, *words, **variables):
        """Return what a program writes with what the user has set."""
        env = {**self.inherited(), **variables}
        return run_program(*words, env=env, cwd=self.home).stdout

    def really(self, wrapper=()):
        """What torch and vLLM took when they ran, and the copies that were mapped."""
        script = write_files(self.home / "bin", {"serve.py": PROBE}) / "serve.py"
        return json.loads(self.run(*wrapper, self.python, script).splitlines()[-1])

    def foretold(self, wrapper=()):
        """The same, from ``patchkit inspect --loaded``, and all of its answer."""
        command = [*wrapper, sys.executable, "-m", "patchkit", "inspect", "--loaded"]
        patchkit = str(Path(sys.modules["patchkit"].__file__).parents[1])
        paths = [patchkit, *filter(None, [self.variables.get("PYTHONPATH")])]
        asked = [*command, "--python", self.python, "--json"]
        answer = json.loads(self.run(*asked, PYTHONPATH=os.pathsep.join(paths)))
        by_path = {copy["path"]: copy for copy in answer["copies"]}
        taken = {}
        for who in ("torch", "vllm"):
            copy = by_path.get(answer[who]["path"])
            # 22907 of 2.29.7+cuda13.0
            parts = copy["version"].partition("+")[0].split(".") if copy else ()
            taken[who] = int("{}{:0>2}{:0>2}".format(*parts)) if copy else None
        mapped = sorted(
            os.path.realpath(path) for path, copy in by_path.items() if copy["mapped"]
        )
        return {**taken, "mapped": mapped}, answer
