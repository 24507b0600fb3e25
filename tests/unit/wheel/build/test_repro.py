"""What differs between two builds is named."""

from __future__ import annotations

import subprocess

import pytest

from support.comparing import first_object, object_digests
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
