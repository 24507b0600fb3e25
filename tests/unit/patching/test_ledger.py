"""What is kept of a patch: the ledger, the originals, and RECORD of an installed package."""

import base64
import csv
import hashlib
import json
import os
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from patchkit import __version__
from patchkit.digests import digest
from patchkit.errors import DriftError, HashMismatchError, SourceError
from patchkit.patching.fix import Request, State
from patchkit.patching.forced_revert import ASIDE, revert_by_force
from patchkit.patching.recipe import load_recipe
from patchkit.patching.workspace import (
    Ledger,
    LedgerRequest,
    LedgerVerdict,
    known_verdicts,
    ledger_path,
    open_workspace,
    original_path,
    originals,
    read_ledger,
)
from patchkit.source.installed_record import rewrite_record
from patchkit.target import targets
from support import write_files

BEFORE, AFTER = "größer\n", "kleiner\n"
NEW = "vllm/E=8,block_shape=[128,128].json"
STOCK = {
    **dict.fromkeys(("CMakeLists.txt", "cmake/utils.cmake", "vllm/__init__.py"), ""),
    "PKG-INFO": "Name: vllm\nVersion: 0.19.1\n",
    "setup.py": "setup\n",
    "vllm/a.py": BEFORE,
    "b.cu": "b\n",
}
LEDGER = Ledger(
    patchkit=__version__,
    recipe="5eed",
    project="vllm",
    version="0.19.1",
    request=LedgerRequest(target="gb10", arch="native", only=(), skip=("x",), also=()),
    files={
        "vllm/a.py": (digest(BEFORE), digest(AFTER)),
        "b.cu": (digest("b\n"), digest("B\n")),
        NEW: ("", digest("{}\n")),
    },
    seen={"setup.py": digest("setup\n"), "gone.py": ""},
    verdicts=(
        LedgerVerdict(id="x", state=State.OFF, severity="", reason="≥ 12", note=""),
    ),
    proofs=("it works",),
)


@pytest.fixture
def patched(make_tree):
    """A tree as an apply leaves it; its state folder is beside it."""
    tree = make_tree(
        "0.19.1", {**STOCK, "vllm/a.py": AFTER, "b.cu": "B\n", NEW: "{}\n"}
    )
    state = tree.root / ".patchkit"
    files = {"vllm/a.py": BEFORE, "b.cu": "b\n"}
    write_files(
        state, {original_path(state, path): text for path, text in files.items()}
    )
    ledger_path(state).write_bytes(LEDGER.to_json())
    return tree, state


def test_a_ledger_is_read_as_it_was_written(patched):
    tree, state = patched
    assert read_ledger(state, "vllm") == LEDGER
    assert read_ledger(tree.root, "vllm") is None
    assert read_ledger(state, "vllm").to_json() == LEDGER.to_json()


VERDICT = asdict(LEDGER.verdicts[0])
REQUEST = asdict(LEDGER.request)


def altered(**changes):
    table = {**json.loads(LEDGER.to_json()), **changes}
    return json.dumps(
        {key: value for key, value in table.items() if value is not None}
    ).encode()


NO_LEDGERS = [
    b"",
    LEDGER.to_json()[:-20],
    b"\xff\xfe{}",
    altered(format=2),
    altered(date="20261122"),
    altered(files={"../a": ["", "0" * 64]}),
    altered(files={"/etc/passwd": ["", "0" * 64]}),
    altered(files={"a/../../b": ["", "0" * 64]}),
    altered(files={"a\0b": ["", "0" * 64]}),
    altered(files={"a": ["", "0" * 63]}),
    altered(seen={"../a": ""}),
    altered(verdicts=[VERDICT, VERDICT]),
    altered(proofs=["\ud800"]),
    altered(libraries={"../a": ["0" * 64, "1" * 64]}),
    altered(libraries={"b.cu": ["0" * 64, "1" * 64]}),
    altered(request={**REQUEST, "target": "toaster"}),
    b"[" * 100_000,
]


def test_a_ledger_that_is_none_is_refused_with_the_way_out(tmp_path):
    state = tmp_path / "sp ace" / ".patchkit"
    for data in NO_LEDGERS:
        write_files(state, {ledger_path(state): data})
        with pytest.raises(DriftError, match=r"ledger\.json: ") as caught:
            read_ledger(state, "nccl")
        assert (
            f"patchkit revert --nccl-src '{state.parent}' --force" in caught.value.hint
        )


@pytest.mark.parametrize(
    "make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to("x")]
)
def test_what_stands_in_the_ledgers_place_is_refused(make, tmp_path):
    make(ledger_path(tmp_path))
    with pytest.raises(DriftError, match=r"ledger\.json: is a "):
        read_ledger(tmp_path, "vllm")


@pytest.mark.parametrize("text", [None, AFTER, "", f"{BEFORE}\n"])
def test_an_original_that_is_missing_or_altered_is_refused(patched, text):
    _tree, state = patched
    place = original_path(state, "vllm/a.py")
    place.unlink()
    if text is not None:
        place.write_text(text, encoding="utf-8")
    with pytest.raises(HashMismatchError, match=r"is not the original of vllm/a\.py"):
        originals(state, LEDGER)


@pytest.mark.parametrize(
    ("path", "text", "edited", "same"),
    [
        ("vllm/a.py", AFTER, "", True),
        ("vllm/a.py", BEFORE, "", False),
        ("vllm/a.py", "mine\n", "vllm/a.py", False),
        (NEW, "mine\n", NEW, False),
        ("setup.py", "other\n", "", False),
        ("gone.py", "", "", False),
        ("unrelated.py", "new\n", "", True),
    ],
)
def test_what_changed_since(patched, path, text, edited, same):
    tree, _state = patched
    (tree.root / path).write_text(text, encoding="utf-8")
    if edited:
        with pytest.raises(
            DriftError, match="edited since patchkit wrote it"
        ) as caught:
            open_workspace(tree.root, "vllm")
        assert caught.value.what.startswith(f"{edited}: ")
        return
    workspace = open_workspace(tree.root, "vllm")
    fixes = (SimpleNamespace(id="x", last=False),)
    recipe = replace(load_recipe("vllm"), digest=LEDGER.recipe, fixes=fixes)
    request = Request(target=targets()["gb10"], skip=frozenset({"x"}))
    assert (known_verdicts(workspace, recipe, request) is not None) is same


# As pip writes it: quoted where need be, CRLF (csv's default), its own line last.
RECORD = (
    "../../../bin/vllm,sha256=AAAA,220\r\n"
    '"vllm/configs/E=8,N=64.json",sha256=BBBB,7\r\n'
    '"vllm/say ""hi"".txt",sha256=CCCC,1\r\n'
    "vllm/__init__.py,sha256=DDDD,10\r\n"
    "vllm/__pycache__/__init__.cpython-312.pyc,,\r\n"
    "vllm/größe.py,sha256=EEEE,3\r\n"
    "vllm-0.19.1.dist-info/RECORD,,\r\n"
)


def sha256(data):
    # The binary distribution format: urlsafe base64 without padding.
    return "sha256=" + base64.urlsafe_b64encode(
        hashlib.sha256(data).digest()
    ).decode().rstrip("=")


@pytest.mark.parametrize("ending", ["\r\n", "\n"], ids=["pip", "uv"])
def test_record_names_the_new_contents_and_created_files_and_nothing_else_changes(
    ending,
):
    record, data = RECORD.replace("\r\n", ending), "größer\n".encode()
    created = {NEW: b"{}\n", "vllm/empty.json": b""}
    changed = dict.fromkeys(("vllm/__init__.py", "vllm/configs/E=8,N=64.json"), data)

    rows = {
        path: (digest(content), len(content))
        for path, content in (changed | created).items()
    }
    text = rewrite_record(record, rows, ["vllm/.patchkit/ledger.json"])

    expected = record
    for stock in (
        "vllm/__init__.py,sha256=DDDD,10",
        '"vllm/configs/E=8,N=64.json",sha256=BBBB,7',
    ):
        name = stock.partition(",sha256")[0]
        expected = expected.replace(stock, f"{name},{sha256(data)},{len(data)}")
    assert text.startswith(expected)
    assert list(csv.reader(text.removeprefix(expected).splitlines())) == [
        ["vllm/.patchkit/ledger.json", "", ""],
        [NEW, sha256(b"{}\n"), "3"],
        ["vllm/empty.json", sha256(b""), "0"],
    ]


# The way out


def contents(root):
    found = (place for place in root.rglob("*") if place.is_file())
    return {place.relative_to(root).as_posix(): place.read_text() for place in found}


@pytest.mark.parametrize(
    "known", [True, False], ids=["with a ledger", "with a damaged one"]
)
def test_every_original_goes_back_and_what_was_edited_goes_aside(patched, known):
    """Without a ledger nobody knows what patchkit wrote, and which files it created."""
    tree, state = patched
    (tree.root / "b.cu").write_text("mine\n")
    if not known:
        ledger_path(state).write_text("{}")
    done = revert_by_force(tree)
    left = {} if known else {NEW: "{}\n"}
    moved = {"b.cu": "mine\n"} if known else {"b.cu": "mine\n", "vllm/a.py": AFTER}
    assert contents(tree.root) == STOCK | left | {
        f"{ASIDE}/{k}": v for k, v in moved.items()
    }
    assert (set(done.moved), done.lost, done.created) == (set(moved), [], known)
    assert not state.exists()
    with pytest.raises(SourceError, match="patchkit has changed nothing here"):
        revert_by_force(tree)


def test_an_original_that_is_damaged_is_named_and_kept(patched):
    tree, state = patched
    original_path(state, "b.cu").write_text("damaged\n")
    done = revert_by_force(tree)
    assert done.lost == ["b.cu"]
    kept = {"b.cu": "B\n", f"{ASIDE}/originals/b.cu": "damaged\n"}
    assert contents(tree.root) == STOCK | kept
