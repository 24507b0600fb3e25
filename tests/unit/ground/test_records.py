"""Records: what fits its class becomes one, and what does not is named by file, line and key."""

import contextlib
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from patchkit.errors import SourceError, UsageError
from patchkit.records import (
    RecordError,
    Utf8,
    matching,
    one_of,
    read_json,
    read_toml,
    record,
)


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True, kw_only=True)
class Inner:
    number: int
    since: str = field(default="", metadata={"key": "from"})

    def __post_init__(self):
        if self.number > 9:
            raise ValueError("is too large")


@dataclass(frozen=True, kw_only=True)
class Outer:
    text: str
    share: float = 0.5
    on: bool = False
    maybe: int | None = None
    either: str | tuple[str, ...] = ""
    word: Literal["a", "b"] = "a"
    colour: Colour = Colour.RED
    version: Version | None = None
    inner: tuple[Inner, ...] = ()
    pair: tuple[str, int] = ("", 0)
    names: frozenset[str] = frozenset()
    table: dict[str, Inner] = field(default_factory=dict)
    named: Annotated[str, matching("[a-z]*", "a name")] = ""
    chosen: Annotated[str, one_of("x", "y")] = "x"
    plain: Utf8 = ""


@dataclass(frozen=True, kw_only=True)
class Checked:
    check: int
    kind: str = ""


WHOLE = {
    "text": "é", "share": 1, "on": True, "maybe": 3, "either": ["a", "b"], "word": "b",
    "colour": "red", "version": "1.0rc1", "inner": [{"number": 1, "from": "x"}, {"number": 2}],
    "pair": ["a", 1], "names": ["a", "a"], "table": {"any key": {"number": 3}}, "named": "abc",
    "chosen": "y",
}  # fmt: skip


def test_a_whole_record():
    assert record(Outer, WHOLE) == Outer(
        text="é", share=1, on=True, maybe=3, either=("a", "b"), word="b", colour=Colour.RED,
        version=Version("1.0rc1"), inner=(Inner(number=1, since="x"), Inner(number=2)),
        pair=("a", 1), names=frozenset("a"), table={"any key": Inner(number=3)}, named="abc",
        chosen="y",
    )  # fmt: skip
    assert record(Outer, {"text": "", "maybe": None}) == Outer(text="")
    assert record(tuple[int, ...], [1, 2]) == (1, 2)
    assert record(Checked, {"check": 1, "kind": "x"}) == Checked(check=1, kind="x")


def test_what_does_not_fit_is_named():
    for change, says in (
        ({"text": 5}, "text: is 5, not a text"),
        (
            {"plain": "a\ud800"},
            "plain: is 'a\\ud800', not a text without half a surrogate pair",
        ),
        ({"share": True}, "share: is true, not a number"),
        ({"on": 1}, "on: is 1, not a bool"),
        ({"maybe": 1.0}, "maybe: is 1.0, not a whole number"),
        ({"either": [1]}, "either[1]: is 1, not a text"),
        ({"word": "c"}, "word: is 'c', not one of a, b"),
        ({"colour": "RED"}, "colour: is 'RED', not one of red"),
        ({"version": "one"}, "version: is 'one', not a Version"),
        ({"inner": [{"number": 1}, 7]}, "inner[2]: is 7, not a table"),
        ({"inner": [{}]}, "inner[1]: lacks the key 'number'"),
        (
            {"inner": [{"number": 1, "since": ""}]},
            "inner[1].since: unknown key; known are",
        ),
        ({"inner": [{"number": 10}]}, "inner[1]: is too large"),
        ({"pair": ["a"]}, "pair: has 1 entries, not 2"),
        ({"table": {"k": {"number": ""}}}, "table.k.number: is '', not a whole number"),
        ({"named": "a b"}, "named: is 'a b', not a name"),
        ({"named": "x" * 99 + "!"}, f"named: is '{'x' * 59}…, not a name"),
        ({"chosen": "z"}, "chosen: is 'z', not one of x, y"),
        ({"other": 1}, "other: unknown key; known are text, share"),
    ):
        with pytest.raises(RecordError) as caught:
            record(Outer, WHOLE | change)
        assert str(caught.value).startswith(says)


def test_what_is_no_json_is_refused():
    for text, says in (
        ("", "is not JSON: Expecting value"),
        ("[1]", "is a list, not a table"),
        (b"\xff", "is not JSON: 'utf-8' codec"),
        ("[" * 99999, "is nested too deeply"),
        ('{"number": ' + "1" * 5000 + "}", "is not JSON: 1{25}… has too many digits"),
        ('{"number": NaN}', "is not JSON: NaN is no finite number"),
    ):
        with pytest.raises(RecordError, match=says):
            read_json(Inner, text)


def test_an_error_in_toml_has_its_file_and_key(tmp_path):
    place = tmp_path / "a.toml"
    place.write_text('text = "a"\n[[inner]]\nnumber = 1\n[[inner]]\nnumber = "1"\n')
    with pytest.raises(SourceError) as caught:
        read_toml(Outer, place, error=SourceError)
    assert caught.value.what == f"{place}: inner[2].number: is '1', not a whole number"
    assert caught.value.hint
    place.write_text("[other]\nx = 1\n[[inner]]\nnumber = 1\n")
    assert read_toml(tuple[Inner, ...], place, key="inner") == (Inner(number=1),)
    with pytest.raises(UsageError, match=r"a.toml: other.x: unknown key"):
        read_toml(Inner, place, key="other")
    with pytest.raises(UsageError, match=r"a.toml: absent: is missing"):
        read_toml(Inner, place, key="absent")
    place.write_text(f"a = {'[' * 5000}")
    with pytest.raises(UsageError, match=r"a.toml: is not TOML: it is nested too"):
        read_toml(Outer, place)
    place.write_text("a = \n")
    with pytest.raises(UsageError, match=r"a.toml: is not TOML: .*line 1"):
        read_toml(Outer, place)


NAMES = st.sampled_from([*WHOLE, "number", "else"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3)
    ),
    max_leaves=5,
)
KEYS = [key for key in WHOLE if key != "text"]


@given(st.fixed_dictionaries({"text": st.text()}, optional=dict.fromkeys(KEYS, VALUES)))
def test_nothing_but_a_record_error_comes_of_any_value(value):
    with contextlib.suppress(RecordError):
        assert asdict(record(Outer, value))["text"] == value["text"]
