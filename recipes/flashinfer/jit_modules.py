"""Have FlashInfer compile modules that its own generators make, where none is compiled.

It runs alone, under the Python that has FlashInfer. Standard input, or the file that is named, is a
JSON list of calls:

    [{"function": "flashinfer.jit.sampling:gen_sampling_module", "arguments": {}, "jobs": 2}]

An argument such as "torch.bfloat16" is that type of torch. Standard output is that of ninja, with
at most ``jobs`` compilers: into FlashInfer's cache one module after the other, as FlashInfer itself
does it; with ``--cuda``, for a wheel, all of one number of jobs at once. A call that this release
does not know, or whose generator fails, ends the script with status 1, after the other modules.
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

_ERRORS: list[str] = []


class _StandIn(ModuleType):
    """A module that has every name: a class of its own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return getattr(self, name)


def main() -> None:
    """Compile the modules of the calls in a file or on standard input."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--cuda",
        help="CUDA's version: compile without torch, the same on every machine",
    )
    parser.add_argument("calls", nargs="?", type=argparse.FileType(), default="-")
    options = parser.parse_args()

    # SIGTERM becomes SIGINT for the whole group: ninja ends its compilers at that.
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGINT))
    calls = json.load(options.calls)

    # ninja lies beside the Python that has FlashInfer.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if options.cuda:
        _stand_in_torch(options.cuda)
    core = _import_core()

    for jobs, group in groupby(calls, key=lambda call: call.get("jobs")):
        if jobs:
            os.environ["MAX_JOBS"] = str(jobs)
        specs = list(filter(None, map(_make_spec, group)))
        if options.cuda:
            for spec in specs:
                spec.sources.sort()  # some come in the order of a folder
            core.build_jit_specs(specs, verbose=True)
            continue

        for spec in specs:
            if not spec.is_aot:
                # One by one, as at run time: modules that are built together share a log of ninja,
                # where FlashInfer looks for none, and compiles them again.
                spec.build(verbose=True, need_lock=True)

    if _ERRORS:
        sys.exit("\n".join(_ERRORS))


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
    """Return the JitSpec that a generator makes; keep the error of one that fails."""
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
    except Exception as error:  # noqa: BLE001 - whatever fails in a generator
        _ERRORS.append(f"{type(error).__name__}: {error}")
        return None


if __name__ == "__main__":
    main()
