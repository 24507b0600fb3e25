"""A record behaves as a frozen dataclass does, though it shares its functions with all others."""

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, dataclass, field, replace

import pytest

from patchkit.frozen import frozen, positional


def made(decorator):
    class Fields:
        name: str
        size: int = 1
        rows: list[int] = field(default_factory=list)

        def __post_init__(self) -> None:
            if self.size < 0:
                raise ValueError("negative")

    return decorator(Fields)


Plain = made(dataclass(frozen=True, slots=True, kw_only=True))
Record = made(frozen)
Ordered = made(positional)


@pytest.mark.parametrize(
    "act",
    [
        lambda kind: repr(kind(name="a", size=2)),
        lambda kind: asdict(replace(kind(name="a", rows=[1]), size=3)),
        lambda kind: kind(name="a") == kind(name="a", size=1),
        lambda kind: kind(name="a") == kind(name="b"),
        lambda kind: kind(name="a") == "a",
        lambda kind: hash(kind(name="a", rows=())) == hash(kind(name="a", rows=())),
        lambda kind: kind(name="a").rows is kind(name="a").rows,
        lambda kind: kind(size=1),
        lambda kind: kind(name="a", sized=1),
        lambda kind: kind("a"),
        lambda kind: kind(name="a", size=-1),
        lambda kind: hash(kind(name="a")),
        lambda kind: setattr(kind(name="a"), "name", "b"),
        lambda kind: delattr(kind(name="a"), "name"),
    ],
)
def test_as_a_frozen_dataclass(act):
    outcomes = []
    for kind in (Plain, Record):
        try:
            outcomes.append(act(kind))
        except (TypeError, ValueError, FrozenInstanceError) as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]


@frozen
class Wider(Record):
    note: str = ""


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


def test_in_order():
    assert Ordered("a", 2) == Ordered("a", size=2) != Ordered("a")
    with pytest.raises(TypeError, match="3 fields"):
        Ordered("a", 2, [], 4)
    match Ordered("a", 2):
        case Ordered(name, size, []):
            assert (name, size) == ("a", 2)
