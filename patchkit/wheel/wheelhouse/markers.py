"""Runs pip as if on another machine: ``python markers.py MACHINE PYTHON PIP-ARGUMENTS...``.

pip's --platform and --python-version choose among files; the markers of requirements it still
answers for the machine it runs on. PEP 508 defines them by these functions of the standard library.
"""

import platform
import runpy
import sys


def main(machine: str, python: str, arguments: list[str]) -> None:
    full = ".".join((*python.split("."), "0", "0")[:3])
    major, minor, patch = full.split(".")
    platform.machine = lambda: machine
    platform.python_version = lambda: full
    platform.python_version_tuple = lambda: (major, minor, patch)
    sys.argv = ["pip", *arguments]
    runpy.run_module("pip", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
