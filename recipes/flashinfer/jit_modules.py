"""Ask FlashInfer's own generators for modules, and have FlashInfer compile those that are missing.

It runs alone, under the Python that has FlashInfer. Standard input, or the file that is named, is a
JSON list of calls:

    [{"function": "flashinfer.jit.sampling:gen_sampling_module", "arguments": {}, "jobs": 2}]

An argument such as "torch.bfloat16" is that type of torch. For each call, standard output has a
line of JSON: ``name``; ``found``, the place of a compiled library ("cache", "provider", "data/aot",
"" for none), and ``library``, its path; ``ninja``, the file that was written, else "". A call that
this release does not know has ``error`` instead. With ``--build`` the output of ninja follows, with
at most ``jobs`` compilers, and a line for each module that was compiled: into FlashInfer's cache
one module after the other, as FlashInfer itself does it; with ``--cuda``, for a wheel, all at once.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import signal
import sys
from itertools import groupby
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

_NOT_THERE = (
    AssertionError,
    AttributeError,
    ImportError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class _StandIn(ModuleType):
    """A module that has every name: a class of its own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return getattr(self, name)


def main() -> None:
    """Do what the docstring of this file says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", action="store_true")
    parser.add_argument(
        "--cuda",
        help="CUDA to compile for, without torch; the same link order anywhere",
    )
    parser.add_argument("calls", nargs="?", type=argparse.FileType(), default="-")
    options = parser.parse_args()
    os.setpgid(0, 0)
    # ninja then ends its compilers.
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGINT))
    calls = json.load(options.calls)

    # ninja lies beside the Python that has FlashInfer.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if options.cuda:
        _stand_in_torch(options.cuda)
    core = _import_core()

    groups = []
    for jobs, group in groupby(calls, key=lambda call: call.get("jobs")):
        specs = list(filter(None, map(_make_spec, group)))
        for spec in specs:
            if options.cuda:
                spec.sources.sort()  # some come in the order of a folder
            if not spec.is_aot:
                spec.write_ninja()
            _tell(spec)
        groups.append((jobs, [spec for spec in specs if not spec.is_aot]))

    for jobs, specs in groups if options.build else ():
        if jobs:
            os.environ["MAX_JOBS"] = str(jobs)
        _build(core, specs, at_once=bool(options.cuda))


def _build(core: Any, specs: list[Any], *, at_once: bool) -> None:
    if at_once:
        core.build_jit_specs(specs, verbose=True)
    for spec in specs:
        if not at_once:
            # As at run time: else ninja would find no log of its own, and compile again.
            spec.build(True, need_lock=True)
        _tell(spec)


def _stand_in_torch(cuda: str) -> None:
    """Put a stand-in in the place of torch, of which generators read types and a few facts."""
    modules: dict[str, Any] = sys.modules
    modules["torch"] = None
    importlib.import_module("tvm_ffi")  # it would call the stand-in, and can do without

    facts = {
        "version": SimpleNamespace(cuda=cuda),
        "cuda": SimpleNamespace(device_count=lambda: 0),
        "_C": SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True),
    }
    modules["torch"] = _StandIn("torch")
    vars(modules["torch"]).update(facts)


def _import_core() -> Any:
    """Return ``flashinfer.jit.core``; the package itself, which imports all kernels, is not run."""
    spec = importlib.util.find_spec("flashinfer")
    if spec is None:
        sys.exit(f"{sys.executable} has no flashinfer")
    package = ModuleType("flashinfer")
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["flashinfer"] = package
    return importlib.import_module("flashinfer.jit.core")


def _make_spec(call: dict[str, Any]) -> Any:
    """Return the JitSpec that a generator makes; tell why there is none, and return None."""
    torch = sys.modules["torch"]
    try:
        arguments = {
            name: getattr(torch, value[6:])
            if str(value).startswith("torch.")
            else value
            for name, value in call["arguments"].items()
        }
        module, _, function = call["function"].partition(":")
        return getattr(importlib.import_module(module), function)(**arguments)
    except _NOT_THERE as error:
        _write({**call, "error": f"{type(error).__name__}: {error}"})
        return None


def _tell(spec: Any) -> None:
    found = ""
    path = spec.jit_library_path
    if spec.is_aot:
        path = spec.aot_path
        found = "data/aot" if path.match("flashinfer/data/aot/*/*") else "provider"
    elif path.exists():
        found = "cache"

    _write(
        {
            "name": spec.name,
            "found": found,
            "library": str(path) if found else "",
            "ninja": "" if spec.is_aot else str(spec.ninja_path),
        }
    )


def _write(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
