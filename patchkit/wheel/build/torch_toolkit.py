"""Give a build a CUDA toolkit that torch's CMake takes, and a torch, for this CPU or another one.

NCCL's build needs a compiler, the runtime and CCCL; torch's CMake also needs cuBLAS, cuSPARSE,
cuFFT, NVRTC and others. The build environment has these libraries by locked hash, since torch
requires them, but only for programs that run: the names without a version, which a linker needs,
and the driver's own library are missing. This module makes what is missing; for another CPU it
also makes Python's headers and CMake's toolchain file. The torch of another CPU cannot be
imported. In its place CMake imports a stand-in (``torch_stand_in/``), which answers from the files
of that torch.
"""

import os
import re
import shutil
import sys
from collections.abc import Collection
from fnmatch import fnmatchcase
from importlib.metadata import distributions
from pathlib import Path

from patchkit.digests import digest, sha256_of
from patchkit.durable.atomic import replacing
from patchkit.errors import HostError, translated
from patchkit.frozen import Fields, Values
from patchkit.process import ask, run
from patchkit.recipes.vllm.build import across
from patchkit.records import RECIPES, read_toml
from patchkit.source.archive import Progress
from patchkit.wheel.build.machine import CROSS, Toolchain
from patchkit.wheel.build.requirements import for_machine, install_locked, made_once

_VERSIONED = r"(?P<name>lib[^/]+?\.so)\.\d+"
_STUB_LIBRARY = 34  # CUDA_ERROR_STUB_LIBRARY of cuda.h
# The names of calls in cuda.h, in declarations and in the values of #define: cuMemAlloc_v2.
_DRIVER_CALL = re.compile(
    r"\bcu[A-Z][A-Za-z0-9]*(?:_v\d+)?(?:_ptsz|_ptds)?\b(?=\s*\(|\s*$)", re.MULTILINE
)


def _link_files(folder: Path, *sources: Path) -> None:
    """Make ``folder`` with links to all files of ``sources``, also without their versions.

    If several sources have a file of the same name, the first source counts.
    """
    folder.mkdir()
    for source in filter(Path.is_dir, sources):
        for entry in sorted(source.iterdir()):
            names = [entry.name]
            # A linker looks for libfoo.so, a program for libfoo.so.13.
            if match := re.fullmatch(_VERSIONED, entry.name):
                names.append(match["name"])

            for link in (folder / name for name in names):
                if not link.is_symlink():
                    link.symlink_to(entry)


def driver_stand_in(header: Path, cxx: Path, library: Path) -> None:
    """Make a stand-in for the driver's library, with all calls that ``cuda.h`` names.

    Each call returns CUDA_ERROR_STUB_LIBRARY, as in NVIDIA's own stub library. Raises HostError if
    ``cxx`` cannot link the stand-in.
    """
    text = header.read_text(encoding="utf-8", errors="replace")
    names = sorted(set(_DRIVER_CALL.findall(text)))
    calls = [f"int {name}(void) {{ return {_STUB_LIBRARY}; }}\n" for name in names]

    library.parent.mkdir(parents=True, exist_ok=True)
    source = library.with_suffix(".c")
    source.write_text("".join(calls), "utf-8")
    command = [
        str(cxx), "-x", "c", "-w", "-fno-builtin", "-shared", "-fPIC", "-nostdlib",
        "-Wl,-soname,libcuda.so.1", str(source), "-o", str(library),
    ]  # fmt: skip
    run(
        *command,
        why="it cannot link a shared library",
        hint="apt install g++",
        timeout=None,
    )
    source.unlink()


# For another CPU

_ASK = """\
import sysconfig
answer = {
    "header": sysconfig.get_config_h_filename(),
    "triple": sysconfig.get_config_var("MULTIARCH") or "",
    "package": "python%s-dev" % sysconfig.get_python_version(),
}
"""
_INCLUDE = r"^[ \t]*#[ \t]*include[ \t]*<({}/python[\w.]+/pyconfig\.h)>"
# Below the toolkit.
_TOOLCHAIN_FILE = "target.cmake"
_CMAKE = """\
set(CMAKE_SYSTEM_NAME "Linux")
set(CMAKE_SYSTEM_PROCESSOR "{machine}")
set(CMAKE_C_COMPILER "{cc}")
set(CMAKE_CXX_COMPILER "{cxx}")
set(CMAKE_CUDA_HOST_COMPILER "{cxx}")
set(CMAKE_FIND_ROOT_PATH "{roots}")
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY "ONLY")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM "NEVER")
"""
_HEADERS = "python"
_LINKS = {
    # nvcc uses these folders because of its host compiler; FindCUDA because of CUDA_TOOLKIT_ROOT.
    f"{CROSS}/include": "../../include",
    f"{CROSS}/lib": "../../lib",
    # CMake's name for this folder, after the processor.
    "targets/aarch64-linux": "sbsa-linux",
}


def build_toolkit(
    toolchain: Toolchain,
    site: Path,
    python: Path,
    dest: Path,
    *,
    root: Path,
) -> None:
    """Write a toolkit for ``toolchain.machine`` that torch's CMake accepts to ``dest``.

    ``site`` has torch and NVIDIA's libraries for that CPU; ``python`` is the interpreter that runs
    the build; ``root`` is the path to which the toolkit is moved for the build. ``dest`` must not
    exist. A file of the toolchain has precedence over the file of the same name in ``site``. Raises
    HostError if the C++ compiler cannot link the driver's stand-in, StorageError for I/O.
    """
    beside = site / "nvidia" / "cu13"
    compiler = toolchain.nvcc.parents[1]
    with translated("the CUDA toolkit is not complete", dest):
        # Copied: nvcc follows links to itself, and looks for the toolkit beside the real file.
        shutil.copytree(compiler / "bin", dest / "bin", symlinks=True)
        (dest / "nvvm").symlink_to(compiler / "nvvm")
        _link_files(dest / "include", toolchain.include, beside / "include")
        _link_files(dest / "lib", toolchain.lib, beside / "lib")
        # Installed toolkits have lib64, NVIDIA's wheels have lib; builds may look in either.
        (dest / "lib64").symlink_to("lib")
        # A build machine may have no driver, and NVIDIA's wheels have no driver library to link.
        driver = dest / "lib" / "stubs" / "libcuda.so"
        if not driver.exists():
            driver_stand_in(dest / "include" / "cuda.h", toolchain.cxx, driver)
    if not toolchain.across:
        return

    (dest / CROSS).mkdir(parents=True)
    for name, leads_to in _LINKS.items():
        (dest / name).symlink_to(leads_to)
    python_headers(python, toolchain.machine, dest / _HEADERS)

    # CMake must look for libraries only here: this machine's driver has a libcuda.so as well.
    sysroot = f"/usr/{toolchain.machine}-linux-gnu"
    roots = (root, site / "torch", site / "nvidia", sysroot)
    text = _CMAKE.format(
        machine=toolchain.machine,
        cc=c_compiler(toolchain.cxx),
        cxx=toolchain.cxx,
        roots=";".join(map(str, roots)),
    )
    (dest / _TOOLCHAIN_FILE).write_text(text, "utf-8")


def python_headers(python: Path, machine: str, dest: Path) -> None:
    """Write the ``pyconfig.h`` of an interpreter, with the macros of ``machine``, below ``dest``.

    Nothing is written if the interpreter has one ``pyconfig.h`` for all CPUs. Raises HostError if
    the interpreter has no headers, StorageError if the file cannot be written.
    """
    facts = ask(python, _ASK)
    header = Path(facts["header"])
    try:
        text = header.read_text("utf-8")
        cross = _find_include(text, f"{machine}-linux-gnu")
        native = _find_include(text, facts["triple"])
        if not cross or not native:
            return
        text = (header.parents[1] / native).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HostError(
            f"{python} has no headers: {error}",
            hint=f"apt install {facts['package']}",
        ) from error

    # Macros that the interpreter's own header does not have are left out.
    rules = RECIPES / "python_headers.toml"
    for macro in read_toml(tuple[Fields, ...], rules, key="macro"):
        name = macro["name"]
        value = macro["value"][machine]
        line = f"#define {name} {value}" if value else f"/* #undef {name} */"
        definition = rf"^(#define {name}\b.*|/\* #undef {name} \*/)$"
        text = re.sub(definition, line, text, flags=re.MULTILINE)

    place = dest / cross
    with translated("Python's headers are not complete", place):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, "utf-8")


def _find_include(text: str, triple: str) -> str:
    """Return the header for a CPU that a ``pyconfig.h`` includes, "" for none."""
    match = re.search(_INCLUDE.format(re.escape(triple)), text, re.MULTILINE)
    return match[1] if match else ""


def cross_variables(toolchain: Toolchain, cuda: Path) -> Values:
    """Return the environment variables of a build for another CPU; ``cuda`` has the toolkit."""
    variables = {}
    headers = cuda / _HEADERS
    if headers.is_dir():
        variables["C_INCLUDE_PATH"] = str(headers)
        variables["CPLUS_INCLUDE_PATH"] = str(headers)
    return variables | {
        "CC": str(c_compiler(toolchain.cxx)),
        "CMAKE_TOOLCHAIN_FILE": str(cuda / _TOOLCHAIN_FILE),
        # CMake's FindCUDA takes the root of another CPU's toolkit from the environment alone.
        "CUDA_TOOLKIT_ROOT": str(cuda),
        # The platform of the wheel, and of setup.py's folders.
        "_PYTHON_HOST_PLATFORM": f"linux-{toolchain.machine}",
    }


def c_compiler(cxx: Path) -> Path:
    """Return the path of GCC's C compiler, which comes in the package of the C++ compiler."""
    return cxx.with_name(cxx.name.replace("g++", "gcc"))


_STAND_IN = Path(__file__).parent / "torch_stand_in"
_TARGET = "target"  # the file of the stand-in that names the target's torch


def install_torch_stand_in(site: Path, target: Path) -> None:
    """Install the stand-in for torch into ``site``; it will read the files of torch in ``target``.

    Both are site-packages folders: ``site`` of the build environment, ``target`` of the wheels for
    the other CPU, which are of the same requirements file. ``target`` must stay in place during the
    build. Raises StorageError.
    """
    files = {
        f"torch/{path.relative_to(_STAND_IN)}": path.read_bytes()
        for path in sorted(_STAND_IN.rglob("*.py"))
    }
    files[f"torch/{_TARGET}"] = os.fsencode(target.absolute() / "torch")
    # The version in torch's metadata has no label such as +cu130.
    (torch,) = distributions(name="torch", path=[str(target)])
    metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {torch.version}\n"
    files[f"torch-{torch.version}.dist-info/METADATA"] = metadata.encode()

    with translated("the stand-in for torch is not complete", site):
        files["torch/version.py"] = (target / "torch/version.py").read_bytes()
        for name, content in files.items():
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            # Another build may be reading the file.
            with replacing(site / name) as file:
                file.write(content)


# pip has to be given each platform by its exact name. DGX OS has glibc 2.39; the oldest glibc of
# wheels for Arm is 2.17.
_PLATFORMS = [f"manylinux_2_{minor}" for minor in range(39, 16, -1)]
_PLATFORMS.append("manylinux2014")


def target_site(
    requirements: Path,
    folder: Path,
    machine: str,
    *,
    python: Path,
    patterns: Collection[str] = (),
    offline: bool,
    progress: Progress,
) -> Path:
    """Return a site-packages folder with the libraries that a build for ``machine`` links with.

    If it is missing or incomplete, it is made below ``folder`` from the locked wheels for that CPU
    whose names match ``patterns``, by default those that torch links with. ``python`` runs pip, and
    must have the version of this Python. Raises BuildError, BusyError, SourceError, StorageError.
    """
    pins = [
        pin
        for pin in for_machine(requirements, machine)
        if any(fnmatchcase(pin.name, each) for each in patterns or across().target)
    ]
    # pip chooses wheels by the version of Python.
    version = "{}.{}".format(*sys.version_info)
    contents = [sha256_of(requirements), version, *(pin.name for pin in pins)]
    home = folder / f"site-{machine}-{digest(' '.join(contents))[:12]}"
    site = home / "packages"

    options = [f"--target={site}", "--no-compile", "--implementation=cp"]
    options += [f"--platform={name}_{machine}" for name in _PLATFORMS]
    with made_once(home, site) as is_empty:
        if is_empty:
            install_locked(
                python,
                requirements,
                pins,
                *options,
                offline=offline,
                progress=progress,
            )
    return site
