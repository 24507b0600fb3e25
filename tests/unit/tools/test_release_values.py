"""Values that the code of a vLLM lists: of variables in envs.py, of flags elsewhere."""

from __future__ import annotations

import pytest

from patchkit.errors import SourceError
from patchkit.runtime.rules.flags import Choices
from patchkit.runtime.rules.variable_values import INTEGER, NUMBER, ONE, SEVERAL, Takes
from tools.release_values import read_choices, read_values

ENVS = """
import os
from typing import Literal
VLLM_SHAPE: Literal["round", "square"] | None = None
VLLM_MODE: Literal["a"] = "a"
VLLM_FREE: str = ""
environment_variables: dict[str, Callable[[], Any]] = {
    "VLLM_SHAPE": lambda: os.getenv("VLLM_SHAPE"),
    "VLLM_MODE": env_with_choices("VLLM_MODE", "a", ["a", "b"]),
    "VLLM_CASE": env_with_choices("VLLM_CASE", None, ["high"], case_sensitive=False),
    "VLLM_LABELS": env_set_with_choices("VLLM_LABELS", default=[], choices=["x", "y"]),
    "VLLM_KERNEL": env_with_choices("VLLM_KERNEL", None, lambda: list(
        __import__("vllm.v1.registry", fromlist=["Kernels"]).Kernels.__members__.keys())),
    "VLLM_OLD": deprecated_env("VLLM_OLD", "v9", "", env_with_choices("VLLM_OLD", None, ["z"])),
    "VLLM_SWITCH": lambda: bool(int(os.getenv("VLLM_SWITCH", "0"))),
    "VLLM_MAYBE": lambda: maybe_convert_bool(os.environ.get("VLLM_MAYBE", None)),
    "VLLM_SET": lambda: int(os.environ["VLLM_SET"]) if "VLLM_SET" in os.environ else None,
    "VLLM_SHARE": lambda: float(os.getenv("VLLM_SHARE", "0.5")),
    "VLLM_WORD": lambda: os.getenv("VLLM_WORD", "0").lower() in ("1", "true"),
    "VLLM_OTHER": lambda: int(os.getenv("OTHER", "0")),
    "VLLM_FREE": lambda: os.getenv("VLLM_FREE", ""),
}
"""
REGISTRY = """
class Kernels(enum.Enum):
    FLASH = "flash"
    TRITON = "triton"
"""
READ = {
    "VLLM_MODE": Takes(how=ONE, words=("a", "b")),
    "VLLM_CASE": Takes(how=ONE, words=("high",), any_case=True),
    "VLLM_LABELS": Takes(how=SEVERAL, words=("x", "y")),
    "VLLM_KERNEL": Takes(how=ONE, words=("FLASH", "TRITON")),
    "VLLM_OLD": Takes(how=ONE, words=("z",)),
    "VLLM_SWITCH": Takes(how=INTEGER),
    "VLLM_MAYBE": Takes(how=INTEGER),
    "VLLM_SET": Takes(how=INTEGER),
    "VLLM_SHARE": Takes(how=NUMBER),
}


@pytest.fixture
def home(tmp_path):
    (tmp_path / "envs.py").write_text(ENVS)
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1/registry.py").write_text(REGISTRY)
    return tmp_path


def test_an_installed_envs_py_says_what_it_takes(home):
    assert read_values(home) == READ


def test_choices_in_an_unknown_form_are_an_error(home):
    (home / "envs.py").write_text(ENVS.replace('["a", "b"]', "make()"))
    with pytest.raises(SourceError, match=r"envs\.py:9: choices in an unknown form"):
        read_values(home)


CODE = {
    "config/a.py": 'Names = None\nNames = Literal["x", "y"]\nOther = Literal["z"]\n',
    "config/b.py": 'Names: dict = {}\nNames = {"one": ("a", "A"), **more, "two": ()}\n',
    "config/c.py": "class Names(Enum):\n    A = 'x'\n    B: str = 'y'\n    def f(self): ...\n",
    "config/d.py": "Names = str\n",
}


@pytest.mark.parametrize(
    ("file", "names"),
    [("a", ("x", "y")), ("b", ("one", "two")), ("c", ("A",)), ("d", ()), ("e", ())],
)
def test_values_are_read_in_the_code(file, names, tmp_path):
    choices = Choices(flag="--x", files=(f"config/{file}.py",), symbol="Names", values=())
    (tmp_path / "config").mkdir()
    for path, text in CODE.items():
        (tmp_path / path).write_text(text)
    assert read_choices(choices, tmp_path) == names
