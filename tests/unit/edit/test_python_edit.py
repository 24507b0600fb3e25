import pytest

from patchkit.edit.python import parsed, swap, wrap
from patchkit.edit.splice import splice
from patchkit.errors import DriftError

MODULE = '''\
"""Übersicht: 漢字 𝟚 before every span."""

import os

def choose(capability, *, fast=False):
    """Größe."""
    name = "größer 𝟚"; limit = capability[0] < 9  # ≥ 9 is fine
    if limit:
        # the old way
        return [
            "marlin",  # slow
            name ]
    for _ in range(3):
        if fast:
            os.sync()
            name = 'fast'
    return ["triton", name]


class Platform:
    level = 1

    @classmethod
    def supported(cls) -> bool:
        return (
            cls.level(90)
            or cls.level( 100 )  # SM100
            or cls.level(120)
        )

    class Inner:
        async def deep(self):
            return self.level(90) and 1
'''


def swapped(text, scope, before, after):
    """The new text; a second swap finds nothing left to do."""
    edits = swap("src/a.py", text, scope, before, after, note="why")
    assert [(edit.path, edit.note) for edit in edits] == [("src/a.py", "why")]
    result = splice(text, edits)
    assert swap("src/a.py", result, scope, before, after, note="why") == []
    parsed("src/a.py", result)
    return result


def with_change(old, new):
    """MODULE with one known piece replaced: what a swap must give, to the last character."""
    assert MODULE.count(old) == 1
    return MODULE.replace(old, new)


def test_swap():
    """Behind non-ASCII text, with other formatting, nested, around itself, and of a method."""
    end = "            name = 'fast'\n"
    for scope, before, after, old, new in (
        ("choose", "capability[0] < 9", "capability[0] not in (9, 10)", "", ""),
        (
            "choose",
            "['marlin',\n  name]",
            "[name]",
            '[\n            "marlin",  # slow\n            name ]',
            "",
        ),
        (
            "choose",
            "os.sync()\nname = 'fast'",
            "if os.name:\n    os.sync()\n\n    name = 'slow'",
            f"            os.sync()\n{end}",
            "            if os.name:\n                os.sync()\n\n                name = 'slow'\n",
        ),
        (
            "choose",
            "name = 'fast'",
            "name = 'fast'\n# Both of them.\nos.sync()",
            end,
            f"{end}            # Both of them.\n            os.sync()\n",
        ),
        (
            "Platform.Inner.deep",
            "async def deep(self):\n    return self.level(90) and 1",
            "async def deep(self):\n    if self.level(90):\n        return 1\n    return 0",
            "            return self.level(90) and 1",
            "            if self.level(90):\n                return 1\n            return 0",
        ),
    ):
        expected = with_change(old or before, new or after)
        assert swapped(MODULE, scope, before, after) == expected


def test_swap_refuses():
    for text, scope, message in (
        (
            "def f():\n    return g(1)\n",
            "f",
            r"^a.py:1: 'a < 9' found 0 times in f, expected 1",
        ),
        ("def g():\n    return a < 9\n", "f", r"^a.py: 0 definitions of f, expected 1"),
        (
            "class C:\n    x = a < 9\n",
            "C.f",
            r"^a.py: 0 definitions of C.f, expected 1",
        ),
        (
            "def f():\n    pass\n\ndef f():\n    return a < 9\n",
            "f",
            r"^a.py: 2 definitions of f, expected 1",
        ),
        (
            "\ndef f():\n    x = [\n        1, a < 9]\n    return a<9\n",
            "f",
            r"^a.py:4,5: 'a < 9' found 2 times in f, expected 1",
        ),
        ("x = 1\ndef f(:\n    return a < 9\n", "f", r"^a.py:2: not valid Python: "),
        ("def f():\n  return a < 9\n return 1\n", "f", r"^a.py:3: not valid Python: "),
        (
            f"x = {'-' * 200_000}1\n",
            "f",
            r"^a.py:1: not valid Python: it is nested too deeply",
        ),
        ("x = '\0'\n", "f", r"^a.py:1: not valid Python: source code "),
    ):
        with pytest.raises(DriftError, match=message):
            swap("a.py", text, scope, "a < 9", "a < 12", note="")


def test_swap_refuses_half_patched_code_and_says_what_is_wrong():
    for text, untrue in (
        (
            "def f():\n    return a < 9 or a < 12\n",
            "'a < 9' found 1 times in f, expected 1",
        ),
        ("def f():\n    x = a < 12\n    return (a < 12)\n", "'a < 9' found 2 times"),
    ):
        with pytest.raises(DriftError, match=r"^a.py:2[:,]") as caught:
            swap("a.py", text, "f", "a < 9", "a < 12", note="")
        assert untrue not in str(caught.value)


HELPER = '''\
def _first(kernels):
    """Ours."""
    return sorted(kernels)
'''
CHOOSER = "@cache\ndef choose(kernels):\n    return kernels[0]\n"
WRAPPED = f"{HELPER}\n\n@cache\ndef choose(kernels):\n    return _first(kernels)[0]\n"


def wrapped(text):
    form = ("choose", "kernels[0]", "_first(kernels)[0]", HELPER)
    return wrap("x.py", text, *form, note="ours first")


def test_wrap_puts_a_function_ahead_and_calls_it():
    assert splice(CHOOSER, wrapped(CHOOSER)) == WRAPPED
    assert wrapped(WRAPPED) == []


def test_half_of_it_or_something_else_is_drift():
    for text, message in (
        (
            WRAPPED.replace("_first(kernels)[0]", "kernels[0]"),
            "definition of _first is there",
        ),
        (WRAPPED.replace(HELPER, ""), "call of _first is there, its definition is not"),
        (WRAPPED.replace("sorted", "list"), "def _first"),
        ("def other(kernels):\n    return kernels[0]\n", "0 definitions of choose"),
        (CHOOSER.replace("kernels[0]", "kernels[1]"), "found 0 times in choose"),
    ):
        with pytest.raises(DriftError, match=message):
            wrapped(text)
