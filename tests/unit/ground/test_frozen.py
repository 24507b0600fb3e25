"""A record is a frozen dataclass that takes its fields by name, or in order, too."""

import copy
import pickle
from dataclasses import FrozenInstanceError, field

import pytest

from patchkit.frozen import frozen, plain_fields, positional


@frozen
class Record:
    name: str
    size: int = 1
    rows: list[int] = field(default_factory=list)
    kind: type = int


@frozen
class Wider(Record):
    note: str = ""


@positional
class Ordered:
    name: str
    size: int = 1


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        *(lambda record, n=n: pickle.loads(pickle.dumps(record, n)) for n in range(6)),
    ],
)
def test_a_copy_is_equal_and_frozen(copied):
    record = Wider(name="a", rows=[1], note="b")
    twin = copied(record)
    assert twin == record != Record(name="a", rows=[1])
    assert twin is not record
    with pytest.raises(FrozenInstanceError):
        twin.name = "b"


def test_by_name_or_in_order():
    assert Ordered("a", 2) == Ordered("a", size=2) != Ordered("a")
    with pytest.raises(TypeError):
        Record("a")
    with pytest.raises(AttributeError):
        object.__setattr__(Ordered("a"), "sized", 1)


def test_plain_fields_leave_out_a_class():
    assert plain_fields(Record(name="a")) == {"name": "a", "size": 1, "rows": []}
