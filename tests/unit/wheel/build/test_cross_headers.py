"""Python's headers for another CPU: those of the distribution, and of any other build."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from patchkit.errors import HostError, StorageError
from patchkit.wheel.build.cross_toolkit import header_for, python_headers
from support.needed import need, need_headers

CROSS = "aarch64-linux-gnu-g++"
SYSTEM = Path("/usr/bin/python3")
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
# Usable is unsigned, so -1 is the largest one.
OF_THE_CPU = """\
#ifdef HAVE_USABLE_WCHAR_T
static_assert((wchar_t)-1 > 0);
#else
static_assert((wchar_t)-1 < 0);
#endif
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


def dispatches(python):
    header = Path(include(python), "pyconfig.h")
    return header.is_file() and "aarch64-linux-gnu" in header.read_text()


def test_the_header_of_one_cpu_is_made_that_of_the_other():
    assert header_for("aarch64", X86) == AARCH64
    assert header_for("x86_64", AARCH64) == X86
    assert header_for("aarch64", AARCH64) == AARCH64


def test_the_headers_of_the_distribution_serve_for_another_cpu(tmp_path):
    need(CROSS)
    if not SYSTEM.exists() or not dispatches(SYSTEM):
        pytest.skip(f"{SYSTEM} has no headers by CPU: apt install python3-dev")
    missing = compiled(SYSTEM)
    if missing.returncode:  # else this machine has the other CPU's headers as well
        assert "/pyconfig.h: No such file" in missing.stderr
    made = python_headers(SYSTEM, "aarch64", tmp_path)
    done = compiled(SYSTEM, EXTENSION + OF_THE_CPU, headers=made)
    assert not done.returncode, done.stderr
    # The folder does nothing to a compiler for the CPU of this machine.
    assert [path.name for path in tmp_path.iterdir()] == ["aarch64-linux-gnu"]


def test_the_headers_of_another_build_of_python_serve_as_they_are(tmp_path):
    need(CROSS)
    need_headers()
    if dispatches(sys.executable):
        pytest.skip(f"{sys.executable} is the distribution's")
    assert python_headers(Path(sys.executable), "aarch64", tmp_path) is None
    assert not list(tmp_path.iterdir())
    done = compiled(sys.executable)
    assert not done.returncode, done.stderr


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


def test_a_header_that_knows_no_such_cpu_lacks_nothing_that_could_be_brought(tmp_path):
    asked = python(tmp_path, DISPATCH.replace("aarch64-", "riscv64-"))
    assert python_headers(asked, "aarch64", tmp_path / "dest") is None
