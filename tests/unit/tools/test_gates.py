"""Gates that leave out 12.x are found by function and expression; what is new is asked about."""

import zipfile
from pathlib import Path

import pytest

from support import write_files
from tools.gates import Gate, Judgement, find_gates, judge, read_library
from tools.seen import pristine

CODE = '''
"""Texts about sm_10x outside of functions that have none."""
import torch
class Kernel:
    def family(self):
        """Docstrings refuse nothing: sm_10x."""
        if not current_platform.is_device_capability_family(100):
            return False, "needs sm_10x"
        return platform.is_device_capability((10, 3)) or p.is_device_capability_family(100)
    def opened(self):
        return p.is_device_capability_family(100) or p.is_device_capability_family(120)
    def major(self, capability):
        def inner():
            return capability.major in (9, 10)
        return capability.major in (9, 10, 12) and n == 10
    def other(self):
        return capability >= 110 or block_size in (100, 128)
    def text(self):
        raise ValueError("needs SM10x")
    def both(self):
        raise ValueError("needs SM10x or SM12x")
'''
LIBRARY = """
LIST = [100, 103]
@supported_compute_capability(LIST)
def older(): ...
@supported_compute_capability([100, 120, 121])
def newer(): ...
def compiled():
    return flags(supported_major_versions=[10, 12])
def guarded(x):
    if not is_sm12x_supported(x): raise ValueError
def closed(major):
    if major != 10: raise ValueError
def silent(): ...
META = OpMeta(name="gemm", group="dense")
OTHER = OpMeta(name="roce", group="comm", archs=("sm120a",))
"""


def _judgement(verdict: str, place: str, *library: str) -> Judgement:
    return Judgement(
        verdict=verdict, places=(place,), reason="why", source="where", library=library
    )


def test_gates_are_found_by_function_and_expression(tmp_path):
    write_files(tmp_path, {"vllm/kernel.py": CODE})
    assert [(each.line, each.place) for each in find_gates(tmp_path)] == [
        (7, "Kernel.family is_device_capability_family(100)"),
        (9, "Kernel.family is_device_capability((10, 3))"),
        (9, "Kernel.family is_device_capability_family(100)"),
        (14, "Kernel.major.inner capability.major in (9, 10)"),
        (17, "Kernel.other capability >= 110"),
        (19, "Kernel.text sm_10x"),
    ]


def test_a_library_says_for_which_capabilities_it_is(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("flash/a.py", LIBRARY)
    assert read_library(tmp_path / "a.whl") == {
        "flash.older": False,
        "flash.newer": True,
        "flash.compiled": True,
        "flash.guarded": True,
        "flash.closed": False,
        "flash.dense.gemm": True,
        "flash.comm.roce": False,
    }


def test_only_what_is_new_asks_a_person():
    gates = [Gate(f"{name} x", "a.py", line) for line, name in enumerate("RRLNT")]
    known = [
        _judgement("right", "R x x2", "f.right"),
        _judgement("lags", "L x", "f.lags"),
        _judgement("tuning", "T x"),
    ]
    before = judge(gates, {"f.right": False, "f.lags": False}, known)
    assert [each.line for each in before.decisions] == ["N x"]
    assert before.opened == {}
    now = judge([*gates, gates[0]], {"f.right": True, "f.lags": True}, known)
    assert [each.says for each in now.decisions] == [
        "a.py:0: judged right, but f.right takes 12.x",
        "a.py:1: judged right, but f.right takes 12.x",
        "a.py:3: nobody has judged it",
        "a.py:0: nobody has judged it",
    ]
    assert now.opened == {known[1]: [gates[2]]}


@pytest.mark.releases
@pytest.mark.parametrize(("version", "number"), [("0.28.0", 77), ("0.33.0", 135)])
def test_every_gate_of_a_release_is_judged(version, number, tmp_path: Path):
    found = judge(find_gates(pristine(version, tmp_path)), {})
    assert (len(found.judged), found.decisions) == (number, [])
