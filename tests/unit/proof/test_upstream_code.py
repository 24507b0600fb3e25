"""Upstream's Python run piece by piece: what is found where, and what may not decide."""

import pytest

from patchkit.errors import ProofError
from patchkit.patching.fix import Case
from patchkit.proof import upstream_code
from patchkit.proof.upstream_code import Anything, Code
from patchkit.recipes.vllm.routing import GB10, SM12X, outcome, prove_decision

FILES = {
    "vllm/a.py": """\
from __future__ import annotations

import math as m
from dataclasses import dataclass
from typing import ClassVar

import torch
from .b import Base, helper as renamed
from vllm import b

if TYPE_CHECKING:
    Shape = None
else:
    Shape = int

LIMIT = m.floor(2.5) + b.ONE


@torch.compile
def area(side: Unknown, times=LIMIT) -> Unknown:
    from vllm.b import ONE

    return renamed(side) * times * ONE


@dataclass(frozen=True)
class Point(Base, torch.nn.Module):
    KIND: ClassVar[str] = "plane"
    x: int = LIMIT

    @classmethod
    def origin(cls) -> Point:
        return cls(0)

    @torch.inference_mode()
    def moved(self, by):
        return Point(self.x + by)


Point.FAR = Point(99)


def same(dtype):
    return dtype == torch.bfloat16


def decides():
    return 1 if torch.cuda.is_available() else 2


def stumbles():
    return LIMIT.nothing


def refuses():
    raise ValueError("not on this device")
""",
    "vllm/b.py": """\
ONE = 1


class Base:
    name = "base"


def helper(x):
    return x * x
""",
    "vllm/broken.py": "import nowhere\n\nclass A(nowhere.B):\n    pass\n\nraise SystemExit\n",
}
A = "vllm/a.py"


@pytest.fixture
def code(make_tree):
    return Code(make_tree("0.25.1", FILES), {})


@pytest.fixture
def here():
    """These files are ours, and may be run in this process."""
    with upstream_code.permitted():
        yield


def test_nothing_is_run_in_this_process_unless_it_is_said(code):
    with pytest.raises(
        RuntimeError, match=r"^vllm/a.py: .* through questions.ask alone"
    ):
        code.get(A, "LIMIT")


@pytest.mark.usefixtures("here")
def test_names_are_found_where_python_would_find_them(code):
    assert code.get(A, "LIMIT") == 3
    assert code.get(A, "area")(2) == 12
    assert code.get(A, "Shape") is None  # the branch that a type checker sees
    assert code.get(A, "Point.origin")().moved(4).x == 4
    assert (code.get(A, "Point").FAR.x, code.get(A, "Point").name) == (99, "base")
    assert (
        code.get("vllm/broken.py", "A").__name__ == "A"
    )  # nothing else in the file is run


@pytest.mark.usefixtures("here")
def test_what_is_not_there_can_be_compared_but_never_decides(code):
    assert code.get(A, "same")(Anything("torch.bfloat16"))
    assert not code.get(A, "same")(Anything("torch.float16"))
    with pytest.raises(ProofError, match=r"the code decides by torch\.cuda"):
        code.get(A, "decides")()


@pytest.mark.usefixtures("here")
def test_a_refusal_is_a_decision_and_a_stumble_is_not(make_tree):
    tree = make_tree("0.25.1", FILES)

    def ask(name):
        return lambda tree, _capability: Code(tree, {}).get(A, name)()

    assert outcome(ask("refuses"), tree, GB10[0]) == "ValueError: not on this device"
    with pytest.raises(
        ProofError, match=r"^vllm/a.py:\d+: .* for 12\.1: AttributeError"
    ):
        outcome(ask("stumbles"), tree, GB10[0])


def test_a_patch_must_change_the_right_devices_and_no_others(make_tree, ask):
    files = {
        "vllm/platforms/cuda.py": "class CudaPlatformBase:\n    pass\n",
        "vllm/platforms/interface.py": "def DeviceCapability(*numbers):\n    return numbers\n",
        "x.py": "def f(cc):\n    return cc >= (12, 0)\n",
    }
    before = make_tree("0.25.1", files)
    one = before.with_texts({"x.py": "def f(cc):\n    return cc == (12, 0)\n"})
    all_of_them = before.with_texts({"x.py": "def f(cc):\n    return cc > (99, 0)\n"})

    def decide(code):
        return code.get("x.py", "f")(
            code.names["current_platform"].get_device_capability()
        )

    def proved(patched, **changed):
        case = Case(stock=before, patched=patched, request=ask(), active=frozenset())
        return prove_decision(case, "f", decide, wanted=False, **changed)

    said = proved(one)
    assert said == "f: False on 12.1, unchanged on 8.0, 9.0, 10.0, 12.0"
    assert proved(all_of_them, changed=SM12X)
    with pytest.raises(ProofError, match=r"f: False on 12.0, expected True"):
        proved(all_of_them)
    with pytest.raises(ProofError, match=r"f: True on 12.1, expected False"):
        proved(before)
