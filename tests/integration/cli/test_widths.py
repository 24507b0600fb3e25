"""Fit what every verb prints into its terminal, with all that it prints into a pipe.

The verbs run in this process, with a pseudo-terminal of a given width for standard output.
"""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchkit.cli import out
from patchkit.wheel.wheelhouse.storage import add_wheel
from support import hosts
from support.terminal import on_terminal, piped
from support.vllm_wheels import vllm_wheel
from support.wheels import write_wheel

WIDTH = 60


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What command lines name: a wheelhouse, a machine, an env file and a wheel."""
    folder = tmp_path_factory.mktemp("widths")
    house = folder / "house"
    tag = "cp38-abi3-manylinux_2_35_aarch64"
    made = write_wheel(folder, "0.25.1+cu130.gb10.446d7c1799", project="vllm", tag=tag)
    for wheel in (made, write_wheel(folder, "1.0", project="dependency-11")):
        add_wheel(house, wheel, {"made": "repack", "target": "gb10"})
    (house / "SHA256SUMS").unlink()
    bad_env = folder / "bad.env"
    bad_env.write_text("export NCCL_IB_TIMEOUT=23\nNCCL_IB_HCAA=1\nVLLM_USE_V9=1\n")
    spark = hosts.build(folder, "one_twin")
    return {
        "house": house,
        "bad_env": bad_env,
        "spark": spark,
        "wheel": vllm_wheel(folder),
    }


_NOTES = ("note ", "beware ", "off ", "next")
_NODE = ("--root", "spark", "--vllm", "0.25.1")


def words(text):
    # How long it took, and how much memory is free, differs from run to run.
    return set(re.sub(r"\d+ s\b|[\d.]+ GiB available", "", text).split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["fixes"], ["arch_lists", "required >=0.11.1 (--arch native)"]),
        (["explain", "arch_lists"], ["Symptom", "silently falls back"]),
        (
            ["serve-args", "--list"],
            ["openai/gpt-oss-120b", "mxfp4", "61", "reported, high"],
        ),
        (["check", "--elsewhere", "bad_env"], ["did you mean NCCL_IB_HCA?", "✗"]),
        (
            ["probe", "--root", "spark"],
            ["NVIDIA GB10", "rocep1s0f0 ACTIVE", "capability 12.1"],
        ),
        (["net", "verify", "--root", "spark"], ["enp1s0f0np0", "next:", "not checked"]),
        (["inspect", "wheel"], ["loads in part", "is missing", "_vllm_fa3_C.abi3.so"]),
        (["wheelhouse", "list", "--dir", "house"], ["dependency-11"]),
        (["verify", "house"], ["SHA256SUMS", "is missing", "next:"]),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value[0], str) else "",
)
def test_nothing_is_lost_cut_or_too_wide(files, arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    arguments = [files.get(word, word) for word in arguments]
    piped(arguments)  # what it writes is there from now on, and each run says the same
    plain = piped(arguments)
    assert not [line for line in plain.splitlines() if line != line.rstrip()]
    shown = on_terminal(arguments, WIDTH)
    joined = " ".join(shown.split())
    assert not [each for each in says if each not in joined], shown
    assert words(plain) <= words(shown)
    assert all(line == line.rstrip() for line in shown.splitlines())


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve-args", "openai/gpt-oss-120b", *_NODE],
        ["env", "--role", "head", *_NODE],
        ["explain", "arch_lists", "--json"],
    ],
    ids=" ".join,
)
def test_what_programs_read_is_not_broken_in_a_terminal(files, arguments):
    arguments = [files.get(word, word) for word in arguments]
    lines = on_terminal(arguments, 60).splitlines()
    # Notes come after it, on standard error, which is this terminal as well.
    data = [
        line for line in piped(arguments).splitlines() if not line.startswith(_NOTES)
    ]
    assert lines[: len(data)] == data
    assert max(map(len, data)) > 60


# The rules by themselves

TEXT = st.text("ab:;/-=.` é中", max_size=60)


@given(TEXT, st.integers(1, 40))
def test_a_broken_line_has_every_word_and_fits(text, width):
    lines = out.wrap(text, width)
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    for number, line in enumerate(lines):
        margin = len(line) - len(line.lstrip(" "))
        alone = len(re.sub("`[^`]*`", "x", line).split()) <= 1
        assert out.length(line) <= width or alone, (number, margin)
        assert line == line.rstrip(" ")


@given(
    st.lists(st.tuples(TEXT, TEXT, TEXT), min_size=1, max_size=5), st.integers(40, 80)
)
def test_a_table_has_every_word_at_any_width(rows, width):
    texts = out.grid(rows, width, heads=("one", "two", "three"))
    said = {word for text in texts for word in text.split()}
    assert {word for row in rows for cell in row for word in cell.split()} <= said
    assert len(out.grid(rows, None)) == len(rows)
    assert not any("\n" in text for text in out.grid(rows, None))


def test_a_table_of_long_columns_fits_into_a_terminal():
    heads = ("on the device", "gb10", "CUDA", "MB", "library", "archs", "fat binaries")
    archs = "80 86 87 89 90 90a 100 100f 110 110f 120 120f compute_80 compute_89"
    name = "vllm/_C_stable_libtorch.abi3.so"
    row = ("loads", "family", "13", "89.4", name, archs, "35 family, 50 compatible")
    other = "vllm/third_party/deep_gemm/_C_extension.abi3.so"
    rows = [row, ("compiles on the device", "-", "-", "328.6", other, "-", "-")]
    texts = out.grid(rows, 80, heads=heads)
    lines = "\n".join(texts).split("\n")
    assert max(map(len, lines)) <= 80
    assert texts[1].startswith("loads                   family    13   89.4  vllm/_C_")
    assert out.grid([("a", "b" * 200)], 80) == ["a  " + "b" * 200]


def test_a_command_is_not_broken():
    line = "  next: put it aside: sudo mv /a/b/c /a/b/c.mine; then `patchkit net plan`"
    assert out.wrap(line, 40) == [line]
    line = "see `patchkit env explain NCCL_IB_HCA` and the log, for the reasons of it"
    assert "`patchkit env explain NCCL_IB_HCA`" in "\n".join(out.wrap(line, 20))
