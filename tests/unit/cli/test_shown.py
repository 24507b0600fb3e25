"""Everything that is printed leaves through cli/out.py, made visible there.

Each verb that prints names from elsewhere gets hostile ones: what comes out holds no character that
a terminal would obey, and no name is taken for markup.
"""

import io
import json
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from patchkit import __version__, cli
from patchkit.cli import out
from patchkit.cli.out import PERIOD, progress
from patchkit.cli.render import finding_blocks, finding_lines
from patchkit.errors import UsageError
from patchkit.finding import Finding, Level, finding
from patchkit.patching.fix import State
from patchkit.patching.recipe import load_recipe
from patchkit.patching.workspace import (
    Ledger,
    LedgerRequest,
    LedgerVerdict,
    ledger_path,
)
from patchkit.quoting import visible
from patchkit.runtime.envfile.env_file import BLANK, with_digest
from support import hosts, terminal, write_files
from support.terminal import runnable
from support.wheels import write_wheel

CLI = Path(cli.__file__).parent
LIBRARY = Path(__file__).parents[2] / "data" / "libraries" / "gb10.so"
SMALL = Path(__file__).parents[2] / "data" / "vllm_small"
MARK = "[/nope]"
SGR = "\x1b[35;107m"  # a colour that patchkit never uses
EVIL = f"{SGR}\x1b]0;x\x07\x9b2J\b\u202e\x7f\x85[bold]"

TAG = "cp38-abi3-manylinux_2_35_aarch64"
WHEEL = f"vllm-0.24.0-{TAG}.whl"


def test_nothing_is_printed_around_the_way_out():
    places = [place for place in sorted(CLI.rglob("*.py")) if place.name != "out.py"]
    assert len(places) > 25
    around = r"click\.(echo|secho|style|confirm|prompt|progressbar)\(|\bprint\(|std(out|err)\.write"
    assert [
        place
        for place in places
        if re.search(rf"{around}|os\.write", place.read_text())
    ] == []


# What the way out does


def test_styles_are_ours_and_a_name_brings_none(monkeypatch):
    line = "a" + out.style(f"x{EVIL}", bold=True) + f" {EVIL}"
    assert line == f"a\x1b[1mx{visible(EVIL)}\x1b[0m {visible(EVIL)}"
    assert out.shown(line) is line
    # An f-string makes a plain text of all: it is safe, and seen at once.
    assert out.shown(f"{out.style('x', bold=True)}") == r"\x1b[1mx\x1b[0m"


def test_a_cell_with_a_newline_stays_in_its_line():
    assert out.table([("a\n✓ all as listed", "b"), ("c", "d")]) == [
        "a\\n✓ all as listed  b",
        "c                   d",
    ]


@given(st.dictionaries(st.text(st.characters()), st.text(st.characters())))
def test_json_is_safe_and_the_same(value):
    with CliRunner().isolation() as streams:
        out.print_json([value])
    text = streams[0].getvalue().decode()
    assert all(each.isprintable() or each == "\n" for each in text)
    assert json.loads(text) == [value]


# click takes ASCII for a locale that was forgotten, and writes UTF-8.
ENCODINGS = {"latin-1": "latin-1", "ascii": "utf-8", "utf-8": "utf-8"}
SAID = [
    ["explain", "arch_lists"],
    ["serve-args", "--list"],
    ["inspect", str(LIBRARY), "--json"],
    ["apply", MARK],
]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_an_encoding_lacks_is_escaped(encoding):
    for arguments in SAID:
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        terminal.run(arguments, stream)
        written = "utf-8" if "--json" in arguments else ENCODINGS[encoding]
        assert stream.buffer.getvalue().decode(written)


def test_colours_go_to_terminals_or_where_they_are_asked_for(monkeypatch):
    for name, coloured in (("x", False), ("FORCE_COLOR", True), ("NO_COLOR", False)):
        monkeypatch.setenv(name, "1")
        assert ("\x1b[" in terminal.piped(["explain", "arch_lists"])) == coloured


def test_help_fits_80_columns_and_cuts_no_line():
    found = {
        words[:number]
        for words, _command in runnable()
        for number in range(len(words) + 1)
    }
    for words in sorted(found):
        usage, *lines = terminal.piped([*words, "--help"], 0).splitlines()
        assert usage.startswith(f"Usage: {' '.join(['patchkit', *words])} [")
        wrong = [
            line
            for line in lines
            if len(line) > 80 or re.search(r"\w(\.\.\.|…)$", line)
        ]
        assert not [line for line in wrong if "VLLM_TUNED" not in line], (words, usage)


@pytest.mark.parametrize(
    ("about", "mark"), [("gpu-throttled", "?"), ("clock-sync", "✓")]
)
def test_nothing_is_fine_while_the_gpu_is_not_checked(about, mark):
    unchecked = Finding(
        level=Level.UNKNOWN, where="spark-1", about=about, what="not checked: why"
    )
    found = [
        Finding(level=Level.OK, where="spark-1", about="ssh", what="answers"),
        unchecked,
    ]

    *shown, summary = map(click.unstyle, finding_lines(found, verbose=False))

    assert summary == f"{mark} 1 not checked, 1 fine; -v shows all"
    assert shown == [f"? spark-1  {about}: not checked: why"] * (mark == "?")


def test_data_goes_out_byte_for_byte():
    with CliRunner().isolation() as streams:
        out.data(f"{EVIL} é \udcff\n")
        out.data(f"+{EVIL}\n")
    assert (
        streams[0].getvalue()
        == f"{EVIL} é ".encode() + b"\xff\n" + f"+{EVIL}\n".encode()
    )


def test_a_difference_in_a_terminal_is_shown(monkeypatch):
    with CliRunner().isolation(color=True) as streams:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        out.data(f"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-old\f\n+{EVIL}{MARK}\n")
    shown = re.sub(r"\x1b\[\d+m", "", streams[0].getvalue().decode())
    assert shown.splitlines()[3:] == [r"-old\x0c", f"+{visible(EVIL)}{MARK}"]


def test_a_progress_bar_shows_what_it_is_of(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with CliRunner().isolation(color=True) as streams:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        with progress() as report:
            report(f"{EVIL}{MARK}")(10**6, 2 * 10**6)
            out.tell("a line")
            report("y" * 100)(1, 2)
    drawn = streams[1].getvalue().decode().split("\r\x1b[K")
    task = f"{visible(EVIL)}{MARK}"
    assert drawn == ["", task, f"{task}: 1 of 2 MB", "a line\n", "y" * 79, "y" * 79, ""]


def test_a_terminal_shows_every_few_seconds_that_work_goes_on(monkeypatch):
    assert out._QUIET <= 2
    monkeypatch.setattr(out, "_QUIET", 0.02)
    with CliRunner().isolation(color=True) as streams:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        with progress() as report:
            report("unpacking")
            time.sleep(0.5)
    drawn = streams[1].getvalue().decode().split("\r\x1b[K")
    assert drawn[1:4] == ["unpacking", "unpacking, 0 s", "unpacking, 0 s"]


def test_in_a_pipe_a_long_task_is_a_line_now_and_then():
    assert PERIOD <= 3
    now = iter([0.0, 1.0, PERIOD, PERIOD + 1, 2 * PERIOD, 5 * PERIOD])
    with (
        CliRunner().isolation() as streams,
        progress(clock=lambda: next(now)) as report,
    ):
        update = report(f"{EVIL}downloading")
        for done in (1, 2, 3, 4, 5, 6):  # the last one is the end, which needs no line
            update(done * 10**9, 6 * 10**9)
    told = streams[1].getvalue().decode().splitlines()
    assert told == [f"{visible(EVIL)}downloading: {n},000 of 6,000 MB" for n in (3, 5)]


def test_the_first_bytes_are_no_rate():
    now = iter([0.0, 30.0, 600.0])
    with (
        CliRunner().isolation() as streams,
        progress(clock=lambda: next(now)) as report,
    ):
        update = report("copying")
        for done in (0, 100, 42 * 10**6):
            update(done, 84 * 10**6)
    told = streams[1].getvalue().decode().splitlines()
    assert told == ["copying: 0 of 84 MB", "copying: 42 of 84 MB, about 10 min left"]


def test_findings_of_one_place_are_told_as_one(monkeypatch):
    # How patchkit was started is how its commands are spelled.
    monkeypatch.setattr("sys.argv", ["patchkit", "verify"])
    drop, why = (
        f"patchkit wheelhouse prune --drop {WHEEL}",
        "beside that torch pip takes stock's",
    )
    wrong = [
        (WHEEL, "x" * 90, why),
        ("o.whl", "is not listed", ""),
        (WHEEL, "needs a", why),
    ]
    found = [finding(UsageError, where, what, drop, why) for where, what, why in wrong]
    assert list(map(click.unstyle, finding_blocks(found))) == [
        *(
            f"✗ {WHEEL}",
            f"  {'x' * 90}",
            "  needs a",
            f"  why:   {why}",
            f"  next:  {drop}",
        ),
        *("✗ o.whl  is not listed", f"  next:  {drop}"),
    ]


# Every verb that prints names from elsewhere


def hostile_wheel(folder, name):
    code = LIBRARY.read_bytes()
    members = {f"vllm/{name}.so": code, f"vllm/{name}{MARK}/b.so": code}
    facts = {"made": name, "target": name, "version": "1", "fixes": [name]}

    def add_sbom(files, home):
        files[f"{home}/sboms/{name}.cdx.json"] = b"{}"

    made = {"files": members, "facts": facts, "change": add_sbom}
    return write_wheel(folder, "0.24.0", project="vllm", tag=TAG, **made)


def inspected(folder, name):
    library = shutil.copy(LIBRARY, folder / f"{name}.so")
    for file in (str(hostile_wheel(folder, name)), str(library)):
        yield ["inspect", file]
        yield ["inspect", file, "--json"]


def wheelhouse(folder, name):
    house = folder / f"house{name}"
    write_files(house, {f"{name}.whl": ""})
    hostile_wheel(house, name)
    manifest = house / "manifest.json"
    facts = {"target": f"{name}{MARK}", "made": name, "version": name, "machine": name}
    row = {
        "filename": WHEEL,
        "sha256": "0" * 64,
        "size": 1,
        "kind": "built",
        "facts": facts,
    }
    spoils = {
        "filename": f"{name}{MARK}.whl",
        "kind": name,
        "size": name,
        "sha256": name,
    }
    for spoiled in ({}, *({field: value} for field, value in spoils.items())):
        manifest.write_text(json.dumps({"format": 2, "wheels": [{**row, **spoiled}]}))
        yield ["wheelhouse", "list", "--dir", str(house)]
        yield ["verify", str(house)]
        yield ["verify", str(house), "--json"]
    yield ["wheelhouse", "prune", "--dir", str(house), "--drop", f"{name}{MARK}"]


def patched_tree(folder, name):
    """A tree whose ledger says hostile things, and one that is none."""
    tree = folder / f"tree{name}"
    shutil.copytree(SMALL, tree)
    (tree / "PKG-INFO").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.24.0\n"
    )
    recipe = load_recipe("vllm")
    said = {"reason": f"{name}{MARK}", "note": f"{name}{MARK}"}
    ledger = Ledger(
        patchkit=__version__,
        recipe=recipe.digest,
        project="vllm",
        version="0.24.0",
        request=LedgerRequest(target="gb10", arch="native", only=(), skip=(), also=()),
        files={},
        seen={},
        verdicts=tuple(
            LedgerVerdict(id=fix.id, state=State.APPLIED, severity="", **said)
            for fix in recipe.fixes
        ),
        proofs=(said["note"],),
    )
    write_files(tree, {ledger_path(tree / ".patchkit"): ledger.to_json()})
    for verb in ("fixes", "apply"):
        yield [verb, "--vllm-src", str(tree)]
        yield [verb, "--vllm-src", str(tree), "--json"]
    yield ["fixes", "--vllm-src", str(folder / f"no{name}")]
    yield ["fixes", "--vllm-src", str(tree), "--target", name]
    yield ["apply", "--vllm-src", str(tree), "--only", name]
    yield ["revert", "--vllm-src", str(folder)]


def env_file(folder, name):
    file = folder / f"{name}.env"
    file.write_text(
        f"NCCL_DEBUG='{name}'\nNCCL_IB_HCA='{name}{MARK}'\nNCCL_{name}{MARK}=1\n"
    )
    yield ["check", "--elsewhere", str(file)]
    yield ["check", "--elsewhere", str(file), "--json"]
    yield ["check", "--elsewhere", str(folder / f"no{name}")]
    yield ["env", "explain", f"{name}{MARK}"]
    root = str(hosts.build(folder, "cable_port0"))
    node = ["--root", root, "--vllm", "0.25.1"]
    head = folder / f"head{name}.json"
    known = {
        "role": "head",
        "topology": "roce",
        "vllm": "0.25.1",
        "nodes": "2",
        "head": "10.0.0.1",
    }
    header = {"digest": BLANK, **known, "executor": f"{name}{MARK}"}
    head.write_text(
        with_digest(json.dumps({"header": header, "environment": {}}, indent=1) + "\n")
    )
    single = ["env", "--role", "single", *node]
    yield ["env", "--role", "worker", *node, "--from", str(head)]
    yield [*single, "--model", f"{name}{MARK}"]
    yield [*single, "--set", f"A={name}{MARK}"]
    yield [*single, "-o", str(folder / f"{name}.new")]
    yield ["serve-args", f"x/{name}{MARK}", *node]
    yield ["serve-args", "x/y", *node, "--with", f"{name}{MARK}"]
    yield ["serve-args", "x/y", *node, "--from", str(file)]


def machine(folder, name):
    """A machine that names itself so, and the facts of a peer that names its interfaces so."""
    root = hosts.build(folder, "cable_port0")
    for place in (
        "proc/sys/kernel/hostname",
        "sys/class/dmi/id/product_name",
        "etc/os-release",
    ):
        (root / place).write_text(f'PRETTY_NAME="{name}{MARK}"', encoding="utf-8")
    (root / "commands/nvidia-smi.csv").write_text(
        f"{name}{MARK}, 12.1, 580.1, [N/A], 0:1.0"
    )
    node = ["--root", str(root)]
    yield ["probe", *node]
    yield ["probe", *node, "--json"]
    yield ["probe", *node, "--save", str(folder / f"saved{name}")]
    yield ["net", "plan", *node, "--role", "head", "--netdev", f"{name}{MARK}"]
    yield ["net", "verify", *node, "--ssh", f"-{name}{MARK}"]


def programs(folder, name):
    """A Python, and ssh, that say hostile things."""
    says = f'#!/bin/sh\ncat "{folder}/said"\ncat "{folder}/said" >&2\nexit 3\n'
    files = {"said": f"{name}{MARK}\n", **dict.fromkeys(("python", "ssh"), says)}
    write_files(folder, files, mode=0o755)
    root = str(hosts.build(folder, "cable_port0"))
    python = str(folder / "python")
    yield ["inspect", "--loaded", "--python", python]
    yield ["probe", "--root", root, "--python", python]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PATH", str(folder), prepend=":")
        yield ["net", "verify", "--root", root, "--ssh", f"peer{name}"]


def mistyped(_folder, name):
    """Words of the command line: quoted by patchkit's own errors, and by click's."""
    said = f"{name}{MARK}"
    for line in (
        *("explain SAID", "fetch SAID", "repack SAID", "repack SAID --json", "xSAID"),
        *("build nccl --src SAID", "build vllm --target SAID"),
        *(
            "inspect --loaded --python /nowhere/SAID",
            "probe --root /nowhere/SAID",
            "fixes --SAID",
        ),
    ):
        yield [word.replace("SAID", said) for word in line.split()]


CASES = (inspected, wheelhouse, patched_tree, env_file, machine, programs, mistyped)


def printed(case, name, *, color=False):
    """What a case prints, without patchkit's own colours; fails if a terminal would obey it."""
    with tempfile.TemporaryDirectory() as folder:
        text = "".join(map(terminal.piped, case(Path(folder), name)))
    assert SGR not in text
    bare = re.sub(r"\x1b\[[\d;]*m", "", text) if color else text
    assert {each for each in bare if not each.isprintable()} <= {"\n", "\t"}, bare
    return bare


@pytest.mark.parametrize("color", [False, pytest.param(True, marks=pytest.mark.e2e)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_hostile_names_are_shown_whole(case, color, monkeypatch):
    if color:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "400")
    text = printed(case, EVIL, color=color)
    assert visible(EVIL) + MARK in text
