"""Find the packages of a Python, and what they would load, without importing any."""

import os
import re
import shutil
import site
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from patchkit.foreign import read_json
from patchkit.frozen import Values
from patchkit.reading import user_path
from patchkit.runtime.host.host import FlashInfer, Nccl, Software
from patchkit.runtime.python import startup
from patchkit.runtime.python.distributions import (
    find_distributions,
    find_owners,
    find_version,
    read_header,
    read_lines,
)
from patchkit.runtime.python.libnccl import nccl_version

# The file of a package with its version, and the line that has it.
_VERSIONS = {"vllm": "_version.py", "torch": "version.py"}
_VERSION = re.compile(r"""^__version__\b[^"'\n]*["'](\d[^"']*)["']""", re.MULTILINE)
_FLASHINFER = "flashinfer_python"
_PREBUILT = "flashinfer_jit_cache"
_MODULE = r"(?m)/([^/\n]+)/\1\.so,"
_ONE_ARCH = r"_sm(\d+)a$"
_OLDEST_CUDA = 13  # its ptxas knows sm_121a and sm_110a


def read_software(python: str | None, environment: Values) -> Software:
    """Return the packages of a Python, by default that of ``find_python``.

    Raises HostError if it does not run or does not answer.
    """
    python = python or find_python(environment)
    facts = startup.ask_interpreter(python, environment)
    torch_nccl = vllm_nccl = None
    if facts.torch:
        process = startup.start_process(facts, environment)
        # In this order: choose_for_torch adds the libraries of torch to ``process``.
        torch_nccl = _read_nccl(startup.choose_for_torch(process), facts)
        if facts.vllm:
            vllm_nccl = _read_nccl(startup.choose_for_vllm(process), facts)

    return Software(
        python=python,
        vllm=_package_version("vllm", facts.vllm, facts.path),
        torch=_package_version("torch", facts.torch, facts.path),
        # The second one beside nightly builds of torch.
        triton=find_version(facts.path, "triton", "pytorch_triton"),
        transformers=find_version(facts.path, "transformers"),
        ray=find_version(facts.path, "ray"),
        cuda=facts.cuda if facts.torch else "",
        vllm_home=str(Path(facts.vllm).parent) if facts.vllm else "",
        torch_nccl=torch_nccl,
        vllm_nccl=vllm_nccl,
        flashinfer=find_flashinfer(facts.path, environment),
    )


def find_python(environment: Values) -> str:
    """Return the Python of VIRTUAL_ENV, else this one if it has vLLM, else that of PATH."""
    if venv := environment.get("VIRTUAL_ENV"):
        python = f"{venv}/bin/python"
        if os.access(python, os.X_OK):
            return python

    for folder in site.getsitepackages():
        if Path(folder, "vllm", "__init__.py").is_file():
            return sys.executable  # patchkit is installed beside it

    path = environment.get("PATH")
    names = ("python3", "python")
    installed = filter(None, (shutil.which(name, path=path) for name in names))
    return next(installed, sys.executable)


def find_ptxas(root: Path, environment: Values) -> str:
    """Return the ptxas below ``root`` of a CUDA toolkit that knows these GPUs; "" for none."""
    toolkits = sorted((root / "usr/local").glob("cuda-*"), reverse=True)
    toolkits.insert(0, root / "usr/local/cuda")
    # Relative, since `root` / an absolute path would lead out of the root.
    if home := environment.get("CUDA_HOME", "").lstrip("/"):
        toolkits.insert(0, root / home)

    for toolkit in toolkits:
        ptxas = toolkit / "bin" / "ptxas"
        if _cuda_major(toolkit) >= _OLDEST_CUDA and ptxas.is_file():
            return f"/{ptxas.relative_to(root)}"
    return ""


def _cuda_major(toolkit: Path) -> int:
    """Return the major version of a toolkit, 0 for an unknown one; NVIDIA's have this file."""
    try:
        facts = read_json((toolkit / "version.json").read_text(encoding="utf-8"))
        return int(facts["cuda"]["version"].partition(".")[0])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _package_version(package: str, origin: str | None, path: Sequence[str]) -> str:
    """Return the version of a package whose file is ``origin``, "" if it is not installed.

    A folder in PYTHONPATH hides the package that is installed, so take the distribution beside the
    package, else the package's own file, else any distribution.
    """
    if origin is None:
        return ""

    home = Path(origin).parent
    version = find_version([str(home.parent)], package)
    if not version:
        text = "\n".join(read_lines(home / _VERSIONS[package]))
        version = "".join(_VERSION.findall(text)[:1])
    return version or find_version(path, package)


def _read_nccl(choice: startup.Choice, facts: startup.InterpreterFacts) -> Nccl:
    """Return a chosen libnccl with its version: that of the file, else that of its package."""
    version = ""
    if choice.path:
        path = os.path.realpath(choice.path)
        version = nccl_version(Path(path))
        if not version and (
            packages := find_owners(facts.path, startup.STEM).get(path)
        ):
            version = packages[0].version
    return Nccl(path=choice.path or "", version=version, why=choice.why)


def find_flashinfer(path: Sequence[str], environment: Values) -> FlashInfer | None:
    """Return the FlashInfer on ``path`` (``sys.path``), None if it is not installed.

    Its modules are those that need no compiling: of the package, of wheels that it takes, and of
    the user's cache. ``{vllm}`` in FLASHINFER_WORKSPACE_BASE stands for the release of vLLM.
    """
    infos = {name: folders[0] for name, folders in find_distributions(path).items()}
    version = find_version(path, _FLASHINFER).partition("+")[0]
    if not version:
        return None

    archs = environment.get("FLASHINFER_CUDA_ARCH_LIST", "").replace(".", "")
    modules = _read_modules(infos[_FLASHINFER])
    trouble = ""
    for name, info in infos.items():
        if name.startswith(_PREBUILT):
            build = find_version(path, _PREBUILT)
            unfit = _find_unfit(
                name, read_header(info, "Version"), build, version, archs
            )
            trouble = unfit or trouble
            modules += [] if unfit else _read_modules(info)

    base = environment.get("FLASHINFER_WORKSPACE_BASE", "~")
    base = base.replace("{vllm}", find_version(path, "vllm"))
    cache = user_path(base) / ".cache/flashinfer" / version
    # FlashInfer sorts the archs, and adds a letter that one lacks: 90a_121a.
    folder = "*_".join(sorted(re.findall(r"\w+", archs), key=len))
    with suppress(OSError):  # another user's folder, or no name of one
        files = cache.glob(f"{folder}*/cached_ops/*/*.so")
        modules += [file.stem for file in files if file.is_file()]

    package = infos[_FLASHINFER].with_name("flashinfer")
    runner = read_lines(package / "jit/cpp_ext.py")
    return FlashInfer(
        version=version,
        home=str(package) if runner else "",
        modules=tuple(modules),
        facts={
            "prebuilt": trouble,
            # With patchkit's fix jit_jobs, or a release that does the same.
            "jobs": "memory" if "MemAvailable" in "".join(runner) else "",
            **_find_compilers(path, environment),
        },
    )


def _find_unfit(name: str, release: str, build: str, version: str, archs: str) -> str:
    """Return why FlashInfer takes nothing of the wheel ``name``, "" if it takes it.

    All wheels of modules have to be of one ``build``, and that of FlashInfer's ``version``.
    """
    arch = re.search(_ONE_ARCH, name)
    if release != build or build.partition("+")[0] != version:
        return "other-version"

    # A wheel for sm121a serves 12.1a alone.
    return "other-arch" if arch and archs and arch[1] not in archs else ""


def _find_compilers(path: Sequence[str], environment: Values) -> Values:
    """Return what vLLM looks for before it takes kernels of FlashInfer, by name; "" for none."""
    programs = environment.get("PATH", os.defpath)
    toolkit = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    # By either, vLLM takes it that nothing has to be compiled.
    cubin = environment.get("VLLM_HAS_FLASHINFER_CUBIN", "").strip("0")
    return {
        "nvcc": shutil.which("nvcc", path=programs) or "",
        "toolkit": shutil.which(f"{toolkit or '/usr/local/cuda'}/bin/nvcc") or "",
        "ninja": shutil.which("ninja", path=programs) or "",
        "cubin": cubin or find_version(path, "flashinfer_cubin"),
    }


def _read_modules(home: Path) -> list[str]:
    """Return the compiled modules that a distribution has installed."""
    return re.findall(_MODULE, "\n".join(read_lines(home / "RECORD")))
