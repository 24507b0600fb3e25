"""Which libnccl is loaded: foretold from the files, and done by the real dynamic loader.

The libraries are small, but real ones: laid out, linked and preloaded as in torch's wheels. Each
libnccl says another version, so whoever calls it tells which one was taken.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from patchkit.runtime.choices import preloaded
from patchkit.runtime.loader import Library, exports, read_library
from wheels import write_wheel

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


def dotted(version):
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def link(place, source="", *, soname=None, needs=(), path=RPATH, tags="--disable-new-dtags"):
    """Compile a shared library that needs others; by default with DT_RPATH, as torch's."""
    place.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-O0", "-x", "c", "-", "-x", "none", "-o", place]
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


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Compiled once: libnccl by name, and torch's libraries by the kind of their path."""
    home = tmp_path_factory.mktemp("parts")
    nccl = {
        name: link(
            home / name / "libnccl.so.2", NCCL % (version, dotted(version)), soname="libnccl.so.2"
        )
        for name, version in VERSIONS.items()
    }
    nccl["anonymous"] = link(home / "anonymous/libnccl.so.2", NCCL % (23007, "2.30.7"))
    cudart = link(home / "libcudart.so.13", soname="libcudart.so.13")
    torch = {}
    for kind, tags in (("rpath", "--disable-new-dtags"), ("runpath", "--enable-new-dtags")):
        lib = home / kind
        cuda = link(
            lib / "libtorch_cuda.so",
            TORCH,
            needs=[nccl["stock"]],
            soname="libtorch_cuda.so",
            tags=tags,
        )
        link(lib / "libtorch_python.so", needs=[cuda], soname="libtorch_python.so", tags=tags)
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
        (self.site / "torch").mkdir()
        (self.site / "torch/__init__.py").write_text(TORCH_INIT)
        (self.site / "torch/version.py").write_text(
            "from typing import Optional\n\n__all__ = []\ncuda: Optional[str] = '13.0'\n"
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
        return str(self.place(self.parts.nccl[name], target or self.home / name / "libnccl.so.2"))

    def torch(self, kind):
        for library in self.parts.torch[kind].iterdir():
            self.place(library, self.site / "torch/lib" / library.name)

    def without_preload(self):
        """As where CUDA's runtime did not come from pip: the list of torch ends before NCCL."""
        init = self.site / "torch/__init__.py"
        init.write_text(TORCH_INIT.replace("libcudart.so.*", "libcudart_of_nobody.so.*"))

    def inherited(self):
        wanted = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME")}
        return {**wanted, **self.variables}

    def really(self, wrapper=()):
        """What torch and vLLM took when they ran, and the copies that were mapped."""
        script = self.home / "bin/serve.py"
        script.parent.mkdir(exist_ok=True)
        script.write_text(PROBE)
        done = subprocess.run(
            [*wrapper, self.python, script],
            env=self.inherited(),
            capture_output=True,
            text=True,
            cwd=self.home,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def foretold(self, wrapper=(), rc=0):
        """The same, from ``patchkit inspect --loaded``, and all of its answer."""
        command = [*wrapper, sys.executable, "-m", "patchkit", "inspect", "--loaded"]
        patchkit = str(Path(sys.modules["patchkit"].__file__).parents[1])
        paths = [patchkit, *filter(None, [self.variables.get("PYTHONPATH")])]
        done = subprocess.run(
            [*command, "--python", self.python, "--json"],
            env={**self.inherited(), "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            cwd=self.home,
        )
        assert done.returncode == rc, done.stdout + done.stderr
        answer = json.loads(done.stdout)
        by_path = {copy["path"]: copy for copy in answer["copies"]}
        taken = {
            who: number(by_path[answer[who]["path"]]) if answer[who]["path"] else None
            for who in ("torch", "vllm")
        }
        mapped = sorted(os.path.realpath(path) for path, copy in by_path.items() if copy["mapped"])
        return {**taken, "mapped": mapped}, answer


def number(copy):
    """22907 of 2.29.7+cuda13.0."""
    major, minor, patch = map(int, copy["version"].partition("+")[0].split("."))
    return major * 10000 + minor * 100 + patch


@pytest.fixture
def env(parts, tmp_path):
    return Environment(parts, tmp_path)


# Each prepares an environment. What is expected stands beside: who answers torch, who answers
# vLLM, how many copies are mapped, and words of the warnings.


def nothing(env):
    pass


def library_path(env):
    env.variables["LD_LIBRARY_PATH"] = str(Path(env.put("custom")).parent)


def preload(env):
    env.variables["LD_PRELOAD"] = env.put("custom")


def preload_of_a_library_without_a_name(env):
    env.variables["LD_PRELOAD"] = env.put("anonymous", env.home / "mine.so")


def preload_by_name(env):
    env.variables["LD_PRELOAD"] = "libnccl.so.2"
    library_path(env)


def preload_of_nothing(env):
    env.variables["LD_PRELOAD"] = "/nowhere/libnccl.so.2"


def pth_file(env):
    line = f"import ctypes; ctypes.CDLL({env.put('custom')!r})\n"
    (env.site / "first.pth").write_text(line)


def sitecustomize(env):
    (env.site / "sitecustomize.py").write_text(
        f"import ctypes; print('noise'); ctypes.CDLL({env.put('custom')!r})"
    )


def sitecustomize_for_all(env):
    text = f"import ctypes; ctypes.CDLL({env.put('custom')!r}, mode=ctypes.RTLD_GLOBAL)"
    (env.site / "sitecustomize.py").write_text(text)


def so_path(env):
    env.variables["VLLM_NCCL_SO_PATH"] = env.put("custom")


def so_path_is_relative(env):
    so_path(env)
    env.variables["VLLM_NCCL_SO_PATH"] = "custom/libnccl.so.2"


def so_path_is_missing(env):
    env.variables["VLLM_NCCL_SO_PATH"] = "~/libnccl.so.2"


def so_path_is_a_name(env):
    env.variables["VLLM_NCCL_SO_PATH"] = "libnccl-other.so.2"
    env.put("custom", env.home / "custom/libnccl-other.so.2")
    env.variables["LD_LIBRARY_PATH"] = str(env.home / "custom")


def so_path_is_empty(env):
    env.variables["VLLM_NCCL_SO_PATH"] = ""


def so_path_is_a_link(env):
    (env.home / "link").symlink_to(env.pip_copy)
    env.variables["VLLM_NCCL_SO_PATH"] = str(env.home / "link")


def so_path_is_a_copy(env):
    env.variables["VLLM_NCCL_SO_PATH"] = env.put("stock")


def so_path_and_preload(env):
    preload(env)
    env.variables["VLLM_NCCL_SO_PATH"] = env.put("third")


def file_replaced(env):
    env.put("custom", env.pip_copy)


def no_preload(env):
    env.without_preload()


def no_preload_but_library_path(env):
    env.without_preload()
    library_path(env)


def runpath(env):
    env.torch("runpath")
    library_path(env)


def runpath_without_preload(env):
    runpath(env)
    env.without_preload()


def second_site(env):
    env.variables["PYTHONPATH"] = str(env.home / "second")
    env.put("second site", env.home / "second/nvidia/nccl/lib/libnccl.so.2")


def second_site_without_preload(env):
    second_site(env)
    env.without_preload()


def beside_torch(env):
    env.pip_copy.rename(env.site / "torch/lib/libnccl.so.2")


def only_library_path(env):
    env.pip_copy.unlink()
    library_path(env)


def library_path_is_the_current_folder(env):
    env.pip_copy.unlink()
    env.put("custom", env.home / "libnccl.so.2")
    env.variables["LD_LIBRARY_PATH"] = "/nowhere:"


def library_path_of_another_cpu(env):
    only_library_path(env)
    place = Path(env.put("third"))
    data = bytearray(place.read_bytes())
    data[18:20] = (0xB7 if data[18] != 0xB7 else 0x3E, 0)  # e_machine
    place.write_bytes(data)
    env.variables["LD_LIBRARY_PATH"] = f"{place.parent}:{env.variables['LD_LIBRARY_PATH']}"


def library_path_with_text_for_a_library(env):
    only_library_path(env)
    env.variables["LD_LIBRARY_PATH"] += "/custom"
    env.put("custom", env.home / "custom/custom/libnccl.so.2")


def two_files_of_one_package(env):
    (env.pip_copy.parent / "libnccl.so.2.29.7").symlink_to("libnccl.so.2")


def linked_packages(env):
    """As uv installs with --link-mode=symlink."""
    for place in (env.pip_copy, env.site / "torch/lib/libtorch_cuda.so"):
        stored = env.home / "cache" / place.name
        stored.parent.mkdir(exist_ok=True)
        place.rename(stored)
        place.symlink_to(stored)


def global_deps_need_it(env):
    needs = [env.parts.nccl["stock"], env.parts.cudart]
    link(env.site / "torch/lib/libtorch_global_deps.so", needs=needs)
    second_site(env)


def no_cuda(env):
    (env.site / "torch/version.py").write_text(
        "from typing import Optional\n\n__all__ = []\ncuda: Optional[str] = None\n"
    )


def no_cuda_but_so_path(env):
    no_cuda(env)
    so_path(env)


UNUSED = "is mapped as well"
SPLIT = "two NCCLs in one process"


@pytest.mark.parametrize(
    ("prepare", "torch", "vllm", "mapped", "warned"),
    [
        (nothing, "stock", "stock", 1, []),
        (library_path, "stock", "stock", 1, ["LD_LIBRARY_PATH leads to"]),
        (preload, "custom", "custom", 2, [UNUSED]),
        (preload_of_a_library_without_a_name, "custom", "stock", 2, [SPLIT]),
        (preload_by_name, "custom", "custom", 2, [UNUSED]),
        (preload_of_nothing, "stock", "stock", 1, ["LD_PRELOAD names /nowhere/libnccl.so.2"]),
        (pth_file, "custom", "custom", 2, [UNUSED, "first.pth names libnccl"]),
        (sitecustomize, "custom", "custom", 2, [UNUSED, "sitecustomize.py names libnccl"]),
        (sitecustomize_for_all, "custom", "custom", 2, [UNUSED]),
        (so_path, "stock", "custom", 2, [SPLIT, "not the same bytes"]),
        (so_path_is_relative, "stock", "custom", 2, [SPLIT]),
        (so_path_is_missing, "stock", None, 1, ["vLLM takes none", "nobody replaces the ~"]),
        (so_path_is_a_name, "stock", "custom", 2, [SPLIT]),
        (so_path_is_empty, "stock", "stock", 1, []),
        (so_path_is_a_link, "stock", "stock", 1, []),
        (so_path_is_a_copy, "stock", "stock", 2, [SPLIT, "the same bytes twice"]),
        (so_path_and_preload, "custom", "third", 3, [SPLIT, UNUSED]),
        (file_replaced, "custom", "custom", 1, []),
        (no_preload, "stock", "stock", 1, []),
        (no_preload_but_library_path, "stock", "stock", 1, ["LD_LIBRARY_PATH leads to"]),
        (runpath, "stock", "stock", 1, ["LD_LIBRARY_PATH leads to"]),
        (runpath_without_preload, "custom", "custom", 1, []),
        (second_site, "second site", "second site", 1, []),
        (second_site_without_preload, "stock", "stock", 1, []),
        (beside_torch, "stock", "stock", 1, []),
        (only_library_path, "custom", "custom", 1, []),
        (library_path_is_the_current_folder, "custom", "custom", 1, []),
        (library_path_of_another_cpu, "custom", "custom", 1, ["it is not for this CPU"]),
        (library_path_with_text_for_a_library, "custom", "custom", 1, []),
        (two_files_of_one_package, "stock", "stock", 1, []),
        (linked_packages, "stock", "stock", 1, []),
        (no_cuda_but_so_path, "stock", "custom", 2, [SPLIT]),
        (global_deps_need_it, "stock", "stock", 2, [UNUSED]),
    ],
)
def test_foretold_as_it_happens(prepare, torch, vllm, mapped, warned, env):
    prepare(env)
    happens = env.really()

    foretold, answer = env.foretold()

    assert foretold == happens
    expected = (VERSIONS[torch], VERSIONS[vllm] if vllm else None, mapped)
    assert (happens["torch"], happens["vllm"], len(happens["mapped"])) == expected
    said = "\n".join(answer["warnings"])
    assert not [words for words in warned if words not in said], said
    assert bool(said) == bool(warned), said


def test_the_system_s_copy(env, tmp_path):
    """In a mount namespace of its own, where ld.so.cache leads to a libnccl as a .deb's does."""
    folder = Path(env.put("third")).parent
    env.pip_copy.unlink()
    cache = tmp_path / "ld.so.cache"
    subprocess.run(["ldconfig", "-C", cache, "-f", "/etc/ld.so.conf", folder], check=True)
    script = f'mount --bind {cache} /etc/ld.so.cache && exec "$@"'
    inside = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("mounting in a namespace is not permitted here")

    happens = env.really(inside)
    foretold, answer = env.foretold(inside)

    assert foretold == happens
    assert (happens["torch"], happens["vllm"]) == (VERSIONS["third"],) * 2
    assert answer["torch"]["why"] == "the system's ld.so.cache"
    assert env.foretold()[0] == {"torch": None, "vllm": None, "mapped": []}


def test_a_torch_that_finds_none(env):
    env.pip_copy.unlink()
    foretold, answer = env.foretold()
    assert foretold == {"torch": None, "vllm": None, "mapped": []}
    assert (
        answer["torch"]["why"] == "libtorch_cuda.so needs libnccl.so.2, and the loader finds none"
    )
    assert answer["vllm"]["why"] == "vLLM asks for libnccl.so.2, and the loader finds none"


def test_a_torch_without_nccl(env):
    no_cuda(env)
    shutil.rmtree(env.site / "torch/lib")
    foretold, answer = env.foretold()
    assert foretold == {"torch": None, "vllm": None, "mapped": []}
    assert "torch is built without NCCL, or has it inside" in answer["torch"]["why"]
    assert answer["vllm"]["why"] == "torch is built without CUDA, so vLLM looks for no libnccl"


# Packages


def install(env, version, library, **more):
    """Unpack a wheel as pip does; pip lets two packages write one file."""
    files = {"nvidia/nccl/lib/libnccl.so.2": library.read_bytes()}
    wheel = write_wheel(env.home / "wheels", version, files=files, **more)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(env.site)


@pytest.mark.parametrize(
    ("installed", "packages", "warned"),
    [
        ([("2.29.7", "stock", {})], ["nvidia-nccl-cu13 2.29.7"], ""),
        ([("2.30.7+gb10.abc", "custom", {})], ["nvidia-nccl-cu13 2.30.7+gb10.abc"], ""),
        (
            [("2.28.9", "third", {"project": "nvidia-nccl-cu12"}), ("2.29.7", "stock", {})],
            ["nvidia-nccl-cu12 2.28.9", "nvidia-nccl-cu13 2.29.7"],
            "belongs to nvidia-nccl-cu12 2.28.9 and nvidia-nccl-cu13 2.29.7: uninstalling one",
        ),
        (
            [("2.30.7", "stock", {})],
            ["nvidia-nccl-cu13 2.30.7"],
            "(2.29.7+cuda13.0) says another version than the package nvidia-nccl-cu13 2.30.7",
        ),
    ],
)
def test_packages(installed, packages, warned, env):
    for version, name, more in installed:
        install(env, version, env.parts.nccl[name], **more)
    (copy,) = env.foretold()[1]["copies"]
    assert [f"{owner['project']} {owner['version']}" for owner in copy["owners"]] == packages
    assert copy["sha256"] == hashlib.sha256(env.pip_copy.read_bytes()).hexdigest()
    said = "\n".join(env.foretold()[1]["warnings"])
    assert warned in said
    assert bool(said) == bool(warned)


def test_a_file_that_was_changed_after_its_installation(env):
    install(env, "2.29.7", env.parts.nccl["stock"])
    env.put("custom", env.pip_copy)
    said = "\n".join(env.foretold()[1]["warnings"])
    assert "was changed since nvidia-nccl-cu13 2.29.7 was installed: pip does not know" in said


def test_versions_of_torch_and_vllm_and_the_text(env, cli):
    for project, version in (("torch", "2.13.0"), ("vllm", "0.33.0")):
        home = env.site / f"{project}-{version}.dist-info"
        home.mkdir()
        (home / "METADATA").write_text(f"Name: {project}\nVersion: {version}\n")
    so_path(env)
    variables = {"VLLM_NCCL_SO_PATH": env.variables["VLLM_NCCL_SO_PATH"]}

    shown = cli("inspect", "--loaded", "--python", env.python, env=variables).stdout

    assert shown.startswith(f"{env.python}: torch 2.13.0, vLLM 0.33.0\n")
    assert f"torch takes 2.29.7+cuda13.0 {env.pip_copy}: torch itself preloads" in shown
    custom = variables["VLLM_NCCL_SO_PATH"]
    assert f"vLLM  takes 2.30.7+cuda13.0 {custom}: VLLM_NCCL_SO_PATH names it" in shown
    assert "warning two NCCLs in one process" in shown


# What cannot be answered


def no_python(home):
    return "/bin/true"


def nowhere(home):
    return str(home / "python")


def without_torch(home):
    venv.create(home / "venv", with_pip=False)
    return str(home / "venv/bin/python")


def stopped(home):
    python = without_torch(home)
    site = next((home / "venv/lib").glob("python*/site-packages"))
    (site / "first.pth").write_text("import os; os._exit(3)\n")
    return python


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (no_python, "/bin/true: exit code 0: it printed nothing"),
        (nowhere, "python: No such file or directory"),
        (without_torch, "python: has no torch"),
        (stopped, "python: exit code 3: it printed nothing"),
    ],
)
def test_no_answer(prepare, says, tmp_path, cli):
    said = cli("inspect", "--loaded", "--python", prepare(tmp_path), rc=9).stderr
    assert says in said
    assert "--python" in said


# The pieces

LISTS = """
def f():
    for folder, pattern in [
        ("cuda_runtime", "libcudart.so.*[0-9]"),
        ('nccl', 'libnccl.so.*[0-9]'),
        ("nvshmem", "libnvshmem_host.so.*[0-9]"),
    ]: pass
"""
CALL = "    _preload_cuda_deps()\n"


@pytest.mark.parametrize(
    ("text", "files", "found"),
    [
        (LISTS + CALL, ["nvidia/cu13/lib/libcudart.so.13", "nvidia/nccl/lib/libnccl.so.2"], 1),
        (LISTS + CALL, ["cuda_runtime/lib/libcudart.so.13", "nccl/lib/libnccl.so.2"], 1),
        (LISTS + CALL, ["nvidia/cu13/lib/libcudart.so.13"], None),
        (LISTS + CALL, ["nvidia/cu12/lib/libcudart.so.12", "nvidia/nccl/lib/libnccl.so.2"], None),
        (LISTS + CALL, ["nvidia/nccl/lib/libnccl.so.2"], None),
        (LISTS, ["nvidia/cu13/lib/libcudart.so.13", "nvidia/nccl/lib/libnccl.so.2"], None),
        (CALL, ["nvidia/cu13/lib/libcudart.so.13", "nvidia/nccl/lib/libnccl.so.2"], None),
    ],
)
def test_what_torch_preloads(text, files, found, tmp_path):
    for file in files:
        (tmp_path / "[site]" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "[site]" / file).touch()
    path = [str(tmp_path), str(tmp_path / "[site]")]
    expected = str(tmp_path / "[site]" / files[found]) if found is not None else None
    assert preloaded(text, "13.0", path) == expected


def test_damaged_libraries_are_none(parts, tmp_path):
    """The loader would not take them; and nothing that a file holds stops patchkit."""
    whole = parts.nccl["stock"].read_bytes()
    assert read_library(str(parts.nccl["stock"])).soname == "libnccl.so.2"
    assert exports(str(parts.nccl["stock"]), "ncclGetVersion")
    assert not exports(str(parts.torch["rpath"] / "libtorch_cuda.so"), "ncclGetVersion")
    place = tmp_path / "libnccl.so.2"
    random = Random(0)
    for _turn in range(300):
        data = bytearray(whole)
        for _flip in range(random.randrange(1, 9)):
            # Headers are where damage matters.
            start = random.choice([0, len(data) - 2048])
            data[start + random.randrange(2048 if start else 512)] = random.randrange(256)
        place.write_bytes(data[: random.choice([None, random.randrange(len(data))])])
        exports(str(place), "ncclGetVersion")
        assert (found := read_library(str(place))) is None or isinstance(found, Library)
    for nothing in (tmp_path / "none", tmp_path):
        assert read_library(str(nothing)) is None
        assert exports(str(nothing), "ncclGetVersion") is False
