"""Python's headers for another CPU: those of the distribution, and of any other build."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from patchkit.errors import HostError, StorageError
from patchkit.wheel.build.cross_toolkit import header_for, python_headers

CROSS = "aarch64-linux-gnu-g++"
X86 = """\
/* Define if we can use x64 gcc inline assembler */
#define HAVE_GCC_ASM_FOR_X64 1
#define HAVE_GCC_ASM_FOR_X87 1
#define HAVE_USABLE_WCHAR_T_TOO 1
/* #undef HAVE_USABLE_WCHAR_T */
#define PY_SUPPORT_TIER 1
#define SIZEOF_WCHAR_T 4
"""
AARCH64 = """\
/* Define if we can use x64 gcc inline assembler */
/* #undef HAVE_GCC_ASM_FOR_X64 */
/* #undef HAVE_GCC_ASM_FOR_X87 */
#define HAVE_USABLE_WCHAR_T_TOO 1
#define HAVE_USABLE_WCHAR_T 1
#define PY_SUPPORT_TIER 2
#define SIZEOF_WCHAR_T 4
"""
EXTENSION = """\
#include <Python.h>
static_assert(sizeof(wchar_t) == SIZEOF_WCHAR_T && sizeof(long) == SIZEOF_LONG);
static_assert(sizeof(void *) == SIZEOF_VOID_P && sizeof(time_t) == SIZEOF_TIME_T);
static_assert(alignof(long) == ALIGNOF_LONG && sizeof(long double) == SIZEOF_LONG_DOUBLE);
PyObject *answer() { return PyLong_FromLong(42); }
"""


def include(python):
    """The folder of an interpreter's headers."""
    code = "import sysconfig; print(sysconfig.get_path('include'), end='')"
    return subprocess.run([python, "-Ic", code], capture_output=True, text=True).stdout


def compiled(python, source=EXTENSION, *, headers=None):
    """How a compiler for another CPU takes an extension, with folders of headers of our own."""
    own = {"CPLUS_INCLUDE_PATH": str(headers)} if headers else {}
    return subprocess.run(
        [CROSS, "-x", "c++", "-I", include(python), "-fsyntax-only", "-"],
        input=source,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C", **own},
        capture_output=True,
        text=True,
    )


def test_the_header_of_one_cpu_is_made_that_of_the_other():
    assert header_for("aarch64", X86) == AARCH64
    assert header_for("x86_64", AARCH64) == X86
    assert header_for("aarch64", AARCH64) == AARCH64


def python(tmp_path, text):
    """An interpreter that says where its header is, and nothing else of this machine's."""
    home = tmp_path / "include"
    (home / "python3.11").mkdir(parents=True)
    (home / "python3.11" / "pyconfig.h").write_text(text)
    script = tmp_path / "python"
    script.write_text(
        f"""\
#!{sys.executable}
import sys, sysconfig
sysconfig.get_config_h_filename = lambda: {str(home / "python3.11" / "pyconfig.h")!r}
sysconfig.get_config_var = lambda name: "x86_64-linux-gnu"
sys.argv = sys.argv[3:]
exec(sys.argv[0], {{"__name__": "__main__"}})
"""
    )
    script.chmod(0o755)
    return script


DISPATCH = """\
# if defined(__x86_64__) && defined(__LP64__)
#  include <x86_64-linux-gnu/python3.11/pyconfig.h>
# elif defined(__aarch64__) && defined(__AARCH64EL__)
#  include <aarch64-linux-gnu/python3.11/pyconfig.h>
# endif
"""


def test_it_is_written_under_the_name_that_the_header_includes(tmp_path):
    asked = python(tmp_path, DISPATCH)
    own = tmp_path / "include" / "x86_64-linux-gnu" / "python3.11" / "pyconfig.h"
    with pytest.raises(HostError, match="has no headers"):
        python_headers(asked, "aarch64", tmp_path / "dest")
    own.parent.mkdir(parents=True)
    own.write_text(X86)
    assert python_headers(asked, "aarch64", tmp_path / "dest") == tmp_path / "dest"
    made = tmp_path / "dest" / "aarch64-linux-gnu" / "python3.11" / "pyconfig.h"
    assert made.read_text() == AARCH64
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        python_headers(asked, "aarch64", tmp_path / "file")
