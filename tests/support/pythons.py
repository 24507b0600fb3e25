"""The Pythons that are here, from 3.11 to 3.14: what is sent to a node has to run on each."""

import shutil
import subprocess
import sys


def _runs(python):
    return not subprocess.run([python, "-c", ""], capture_output=True).returncode


# A shim of a version that is not installed is found, and fails.
_OTHERS = (shutil.which(f"python3.{minor}") for minor in (11, 12, 13, 14))
PYTHONS = list(dict.fromkeys([sys.executable, *(each for each in _OTHERS if each and _runs(each))]))
