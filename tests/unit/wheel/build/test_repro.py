"""What differs between two builds is named."""

from __future__ import annotations

import subprocess
import zipfile

import pytest

from patchkit.wheel.build.make import object_digests
from support.comparing import first_member, first_object
from support.needed import need

CODE = "static int calls;\nint answer(void) { return %d + calls++; }\nconst char text[] = %s;\n"


@pytest.fixture
def compiled(tmp_path):
    """Objects of a C file, compiled in a folder: ``compiled("a", 42)`` is their digests."""
    need("gcc")

    def make(name, number, *flags, text='"same"', comment=""):
        folder = tmp_path / name / "obj"
        folder.mkdir(parents=True)
        (folder / "code.c").write_text(comment + CODE % (number, text))
        command = ["gcc", "-O1", "-fPIC", *flags, "-c", "code.c", "-o", "code.o"]
        subprocess.run(command, cwd=folder, check=True)
        return object_digests(tmp_path / name)

    return make


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        (["-g"], {}),  # the folder is in the debug information
        (["-g3"], {"comment": "// a line more\n"}),
        (["-Dcalls=count"], {}),  # the name of a static variable
        (["-fno-ident"], {}),
    ],
)
def test_what_is_not_loaded_does_not_count(compiled, flags, more):
    first, second = compiled("one", 42), compiled("two", 42, *flags, **more)
    assert list(first) == ["obj/code.o"]
    assert first == second
    assert first_object(first, second) == ""


@pytest.mark.parametrize("change", [{"number": 43}, {"text": '"diff"'}, {"text": "__FILE__"}])
def test_code_and_data_count(compiled, change):
    first = compiled("one", 42)
    second = compiled("two", **{"number": 42, **change})
    assert first_object(first, second) == "obj/code.o"


def test_a_damaged_object_counts_as_its_bytes(compiled, tmp_path):
    whole = compiled("one", 42)
    place = tmp_path / "one/obj/code.o"
    place.write_bytes(place.read_bytes()[:40])
    damaged = object_digests(tmp_path / "one")
    assert damaged != whole
    place.write_bytes(b"no object at all")
    assert object_digests(tmp_path / "one") not in (whole, damaged)


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ({}, {}, ""),
        ({"a": "1", "b": "2"}, {"a": "1", "b": "2"}, ""),
        ({"b": "1", "a": "1"}, {"a": "2", "b": "2"}, "a"),
        ({"a": "1"}, {"a": "1", "b": "1"}, "b"),
        ({"c": "1", "b": "1"}, {"c": "1"}, "b"),
    ],
)
def test_the_first_object(first, second, named):
    assert first_object(first, second) == named


def write_zip(place, members, *, year=1980, mode=0o644):
    with zipfile.ZipFile(place, "w") as bundle:
        for name, data in members.items():
            info = zipfile.ZipInfo(name, (year, 1, 1, 0, 0, 0))
            info.external_attr = mode << 16
            bundle.writestr(info, data)
    return place


@pytest.mark.parametrize(
    ("members", "how", "named"),
    [
        ({"a": "1", "b": "2"}, {}, ""),
        ({"a": "1", "b": "3"}, {}, "b"),
        ({"a": "0", "b": "3"}, {}, "a"),
        ({"a": "1"}, {}, "b is in one of them only"),
        ({"a": "1", "b": "2", "c": "3"}, {}, "c is in one of them only"),
        ({"b": "2", "a": "1"}, {}, "the order of the members"),
        ({"a": "1", "b": "2"}, {"year": 2026}, "the zip's own fields, such as times and modes"),
        ({"a": "1", "b": "2"}, {"mode": 0o755}, "the zip's own fields, such as times and modes"),
    ],
)
def test_the_first_member(tmp_path, members, how, named):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    first = write_zip(tmp_path / "one/x.whl", {"a": "1", "b": "2"})
    second = write_zip(tmp_path / "two/x.whl", members, **how)
    assert first_member(first, second) == named
    assert first_member(second, first) == named


def test_the_file_name(tmp_path):
    first, second = (write_zip(tmp_path / name, {"a": "1"}) for name in ("x.whl", "y.whl"))
    assert first_member(first, second) == "the file name"
