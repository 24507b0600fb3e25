"""Answer as the Python of the root file system, which has nothing of patchkit's.

    python3 inside.py libraries PATH …    a line of JSON for torch, then one for each library
    python3 inside.py modules NAME …      a line of JSON for each module
    python3 inside.py run SCRIPT …        what a script of vLLM's says, where there is no GPU

Lines are printed one by one: what ends the process is then known to come from the next.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import runpy
import sys
from pathlib import Path
from typing import Any

KEYS = ("CPU", "CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "Meta")


def libraries(paths: list[str]) -> None:
    """Load extensions as vLLM does, and tell which operators each has registered."""
    import torch

    mapped = {
        line.split(maxsplit=5)[5].strip()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libnccl" in line
    }
    tell(torch=torch.__version__, cuda=torch.version.cuda, nccl=sorted(mapped))
    before = registered(torch)
    for path in paths:
        print(f"loading {path}", file=sys.stderr, flush=True)
        spec = importlib.util.spec_from_file_location(
            Path(path).name.partition(".")[0], path
        )
        assert spec is not None
        assert spec.loader is not None
        try:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except ImportError as error:
            tell(path=path, error=str(error))
            continue
        after = registered(torch)
        new = {name: after[name] for name in after.keys() - before.keys()}
        tell(
            path=path,
            operators=new,
            names=[n for n in dir(module) if not n.startswith("__")],
        )
        before = after


def registered(torch: Any) -> dict[str, str]:
    """Return every operator's schema, and the dispatch keys that it has a kernel for."""
    schemas = {}
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name + (
            f".{schema.overload_name}" if schema.overload_name else ""
        )
        schemas[name] = str(schema)
    kernels: dict[str, list[str]] = {}
    for key in KEYS:
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(key):
            kernels.setdefault(name, []).append(key)
    return {
        name: f"{schema} [{' '.join(kernels.get(name, []))}]"
        for name, schema in schemas.items()
    }


def modules(names: list[str]) -> None:
    """Import modules, and tell their versions."""
    for name in names:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            tell(module=name, error=str(error))
        else:
            tell(module=name, version=getattr(module, "__version__", ""))


def run(command: list[str]) -> None:
    """Run a script of vLLM's on its platform for CPUs, as `vllm bench` does without a GPU.

    Its other subcommands find no device then, and stop before they say even a version.
    """
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms.current_platform = CpuPlatform()
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    {"libraries": libraries, "modules": modules, "run": run}[sys.argv[1]](sys.argv[2:])
