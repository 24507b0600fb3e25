"""What a machine lacks is said all at once, with what supplies it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from patchkit.wheel.vllm.needs import Needs, lacked, read_needs, recorded_needs
from support.needed import need_headers

EASY = Needs(
    torch="2.11.0", python=">=3.11", standard=17, gcc="", patch=False, rust="", protoc=False
)
HARD = recorded_needs(Version("0.28.0"))
HERE = Path(sys.executable)


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine with nothing on PATH but what is put into ``bare``."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    return programs


def program(place, text):
    place.write_text(f"#!/bin/sh\n{text}\n")
    place.chmod(0o755)
    return place


def gcc(folder, version):
    major, minor, patch = version.split(".")
    lines = [f"#define __GNUC__ {major}", f"#define __GNUC_MINOR__ {minor}"]
    lines += [f"#define __GNUC_PATCHLEVEL__ {patch}"]
    return program(folder / "g++", "\n".join(f"echo '{line}'" for line in lines))


def said_of(*arguments, **options):
    return [f"{found.what}: {found.hint}" for found in lacked(*arguments, **options)]


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("12.2.0", "apt install g++-13-aarch64-linux-gnu (Debian 13, Ubuntu 24.04)"),
        ("12.2.0", "then CXX=aarch64-linux-gnu-g++-13"),
        (None, "no C++ compiler for aarch64: apt install g++-13-aarch64-linux-gnu"),
    ],
)
def test_another_cpu_takes_the_compiler_for_it(tmp_path, version, says):
    cxx = gcc(tmp_path, version) if version else None
    needed = replace(EASY, gcc="13", standard=20)
    assert any(says in line for line in said_of(needed, HERE, cxx, across="aarch64"))


def test_all_that_is_missing_is_said_at_once(bare, tmp_path):
    needed = replace(HARD, gcc="13", python=">=3.99,<4")
    said = "\n".join(said_of(needed, HERE, gcc(tmp_path, "12.2.0")))
    assert "is outside >=3.99,<4: install patchkit into another one" in said
    assert "is GCC 12.2.0; the release takes C++20, GCC 13 or later: apt install g++-13" in said
    assert "no program `patch`: apt install patch" in said
    said = "\n".join(said_of(HARD, Path("/none"), None))
    assert "/none does not run" in said
    assert "no C++ compiler: apt install g++-11" in said


@pytest.mark.parametrize(
    ("standard", "least", "found", "fine"),
    [
        (20, "", "9.4.0", False),
        (20, "", "10.1.0", True),
        (20, "11.3", "11.3.0", True),
        (20, "13", "12.9.9", False),
        (20, "11.3", "9.0.0", False),  # as text it would be the later one
    ],
)
def test_the_gate_of_gcc(tmp_path, standard, least, found, fine):
    need_headers()
    said = said_of(replace(EASY, standard=standard, gcc=least), HERE, gcc(tmp_path, found))
    assert said == [] if fine else f"GCC {found}" in said[0]


def test_another_tree_names_its_own_torch(make_tree):
    texts = {"pyproject.toml": '[build-system]\nrequires = ["cmake", "torch == 2.15.0"]\n'}
    found = read_needs(make_tree("0.34.0.dev1", texts))
    assert found == replace(recorded_needs(Version("0.34.0")), torch="2.15.0")
