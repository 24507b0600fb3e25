"""The folder of wheels: what it tells, what it refuses, and that every accident leaves it whole."""

import hashlib
import json
import subprocess

import pytest

from patchkit.errors import SourceError, UsageError
from patchkit.wheel.file.wheelfile import find_faults
from patchkit.wheel.wheelhouse.storage import add_wheel, check_room, load_manifest
from patchkit.wheel.wheelhouse.verify import check_files, prune_wheelhouse
from support.filling import contents, held, kinds
from support.wheels import HERE, write_wheel

FACTS = {"target": "gb10", "archs": ["12.1a"], "toolchain": {"nvcc": "13.0.88"}}
OURS, NEWER, STOCK = "2.29.7+gb10.abc123", "2.29.7+gb10.def456", "2.29.7"
FILE = f"nvidia_nccl_cu13-{OURS}-{HERE}.whl"


def test_what_it_tells(house, made):
    wheel = made(OURS)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    place = add_wheel(house, wheel, FACTS)
    assert place == house / wheel.name
    assert place.read_bytes() == wheel.read_bytes()
    assert json.loads((house / "manifest.json").read_text()) == {
        "format": 2,
        "wheels": [
            {
                "filename": FILE,
                "project": "nvidia-nccl-cu13",
                "version": OURS,
                "tag": HERE,
                "sha256": digest,
                "size": wheel.stat().st_size,
                "kind": "built",
                "facts": FACTS,
            }
        ],
    }
    command = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    checked = subprocess.run(
        command, cwd=house, capture_output=True, text=True, check=True
    )
    assert checked.stdout == f"manifest.json: OK\nrequirements.txt: OK\n{FILE}: OK\n"
    line = (house / "requirements.txt").read_text().splitlines()[-1]
    assert line == f"nvidia-nccl-cu13=={OURS} --hash=sha256:{digest}"
    assert check_files(house) == ()
    assert {path.name for path in house.iterdir()} == {FILE, *DOCUMENTS}


@pytest.mark.parametrize(
    (
        "there",
        "new",
        "tag",
    ),  # again, from another state of the recipe, with another tag
    [
        (OURS, OURS, HERE),
        (OURS, NEWER, HERE),
        (STOCK, STOCK, HERE.replace("2_17", "2_35")),
    ],
)
def test_an_older_build_gives_way(there, new, tag, house, made):
    add_wheel(house, made(there, files={"a": b"old"}), {"old": True})
    said = []
    place = add_wheel(house, made(new, tag=tag), FACTS, say=said.append)
    assert [path.name for path in house.glob("*.whl")] == [place.name]
    (entry,) = load_manifest(house).wheels
    assert (entry.name, entry.facts) == (place.name, FACTS)
    assert check_files(house) == ()
    old = f"nvidia_nccl_cu13-{there}-{HERE}.whl"
    expected = [f"{old}: an older build of nvidia-nccl-cu13=={new}, replaced"]
    assert said == (expected if old != place.name else [])


@pytest.mark.parametrize(
    ("there", "new"),
    [
        (STOCK, OURS),
        (OURS, STOCK),
        (OURS, "2.30.7+gb10.abc123"),
        (OURS, OURS.replace("gb10", "thor")),
    ],
)
@pytest.mark.parametrize("listed", [True, False])
def test_what_pip_could_not_resolve_is_refused(there, new, listed, house, made):
    if listed:
        add_wheel(house, made(there), {})
    else:
        write_wheel(house, there)
    before = contents(house)
    with pytest.raises(UsageError) as refused:
        add_wheel(house, made(new), {})
    assert refused.value.what.startswith(
        f"{house} holds nvidia_nccl_cu13-{there}-{HERE}.whl; "
    )
    assert "ResolutionImpossible" in refused.value.why
    assert f"--drop nvidia_nccl_cu13-{there}-{HERE}.whl" in refused.value.hint
    assert contents(house) == before
    with pytest.raises(UsageError):
        check_room(house, made(new).name)
    prune_wheelhouse(house, drop=[f"nvidia-nccl-cu13=={there}"])
    assert check_room(house, made(new).name) == ()
    add_wheel(house, made(new), {})
    assert held(house) == [new]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nccl.whl", "is not the name of a wheel"),
        ("nccl-1.0-py3-none-any.zip", "is not the name of a wheel"),
        ("nccl-1.0-py3-none-a\nny.whl", "is not the name of a wheel"),
        ("nccl-one-py3-none-any.whl", "is not the name of a wheel"),
        ("nccl-1.0-py3-none-win_amd64.whl", "is for win_amd64, not for Linux"),
    ],
)
def test_names_that_are_refused(name, says, house, tmp_path):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(SourceError, match=says):
        add_wheel(house, tmp_path / name, {})
    assert not house.exists()


# Damaged wheels

LIBRARY = "nvidia/nccl/lib/libnccl.so.2"


def replaced(name, old, new):
    def change(members, home):
        text = members[f"{home}/{name}"]
        members[f"{home}/{name}"] = text.replace(old, new)

    return change


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            lambda m, _: m.update({LIBRARY: b"x" * len(m[LIBRARY])}),
            f"{LIBRARY}: its sha256 is not",
        ),
        (lambda m, _: m.update({LIBRARY: b"x"}), f"{LIBRARY}: has 1 bytes, "),
        (lambda m, _: m.update({"b": b""}), "b: is not in RECORD"),
        (lambda m, _: m.pop(LIBRARY), f"{LIBRARY}: is in RECORD only"),
        (lambda m, home: m.pop(f"{home}/RECORD"), "RECORD: is missing"),
        (
            replaced("METADATA", b"nccl", b"ncc1"),
            "METADATA is of nvidia-ncc1-cu13 2.29.7, not",
        ),
        (replaced("WHEEL", b"py3", b"py2"), "WHEEL says py2-none-"),
        (replaced("RECORD", b"sha256", b"md5"), f"{LIBRARY}: has no sha256 in RECORD"),
        (replaced("RECORD", b"sha256=", b"sha256=\0"), f"{LIBRARY}: its sha256 is not"),
        (replaced("RECORD", b"l", b"\xff"), "cannot be read: 'utf-8' codec"),
        (
            lambda m, _: m.update({"a-1.dist-info/x": b""}),
            "has no .dist-info folder of nvidia",
        ),
    ],
)
def test_a_wheel_that_is_not_as_its_record_says(change, fault, house, made):
    wheel = made(STOCK, change=change)
    assert [found for found in find_faults(wheel) if fault in found]
    with pytest.raises(SourceError) as refused:
        add_wheel(house, wheel, {})
    assert refused.value.what.startswith(f"{wheel}: ")
    assert contents(house) == {}


def test_a_signed_wheel_has_no_fault(made):
    def sign(members, home):
        members[f"{home}/RECORD.jws"] = b"{}"

    assert list(find_faults(made(STOCK, change=sign))) == []


# verify and prune


def change(name, old, new):
    def spoil(house):
        (house / name).write_bytes((house / name).read_bytes().replace(old, new))

    return spoil


STRAY, FOREIGN = f"stray-1.0-{HERE}.whl", "a-1.0-py3-none-win_amd64.whl"
DOCUMENTS = ["manifest.json", "requirements.txt", "SHA256SUMS"]


@pytest.mark.parametrize(
    ("spoil", "name", "code", "pruned"),
    [
        (change(FILE, b"nccl", b"NCCL"), FILE, 8, []),
        (change(FILE, b"PK", b"PKPK"), FILE, 8, []),
        (lambda house: (house / FILE).unlink(), FILE, 7, [FILE, *DOCUMENTS]),
        (lambda house: write_wheel(house, "1.0", project="stray"), STRAY, 2, [STRAY]),
        (lambda house: (house / FOREIGN).touch(), FOREIGN, 2, [FOREIGN]),
        (change("SHA256SUMS", b"a", b"b"), "SHA256SUMS", 8, ["SHA256SUMS"]),
        (
            change("requirements.txt", b"a", b"b"),
            "requirements.txt",
            8,
            ["requirements.txt"],
        ),
        (
            lambda house: (house / "requirements.txt").unlink(),
            *("requirements.txt", 8, ["requirements.txt"]),
        ),
        (lambda house: (house / ".journal").mkdir(), ".journal", 7, [".journal"]),
    ],
)
def test_verify_finds_and_prune_makes_right(spoil, name, code, pruned, house, made):
    wheel, found = made(OURS), {(name, code)}
    add_wheel(house, wheel, FACTS)
    spoil(house)
    before = contents(house)

    assert {*kinds(house)} == found
    assert all(finding.what and finding.hint for finding in check_files(house))
    planned = prune_wheelhouse(house, dry_run=True)
    assert contents(house) == before
    assert prune_wheelhouse(house) == planned
    assert [each.filename for each in planned] == pruned

    # What was damaged stays as evidence, until it is dropped or built again.
    assert {*kinds(house)} == (set() if pruned else found)
    add_wheel(house, wheel, FACTS)
    assert check_files(house) == ()


def test_without_a_manifest_nothing_is_removed(house, made):
    add_wheel(house, made(OURS), FACTS)
    (house / "manifest.json").unlink()
    assert (FILE, 2) in kinds(house)
    with pytest.raises(
        SourceError, match="is missing, so nothing says which wheels belong here"
    ):
        prune_wheelhouse(house)
    assert (house / FILE).exists()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "\udcff", "[" * 100_000, '{"format": 3}', '{"format": 1, "wheels": 3}'],
)
def test_a_manifest_that_is_none(text, house, made):
    add_wheel(house, made(OURS), FACTS)
    (house / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    before = contents(house)
    for action in (
        load_manifest,
        check_files,
        prune_wheelhouse,
        lambda house: add_wheel(house, made(OURS), {}),
    ):
        with pytest.raises(SourceError, match=r"manifest\.json: cannot be read"):
            action(house)
    assert contents(house) == before
