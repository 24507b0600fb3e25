"""Kills, several at once, and links: a wheelhouse is as it was, or as it should be.

That full disks change nothing, at every system call, is shown by tests/e2e/torture.
"""

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
from functools import partial

import pytest

from patchkit.errors import HashMismatchError, StorageError
from patchkit.wheel.file.wheelfile import WheelName
from patchkit.wheel.wheelhouse.fill import fill_wheelhouse
from patchkit.wheel.wheelhouse.resolve import NodePlatform
from patchkit.wheel.wheelhouse.storage import (
    LINKED,
    Kind,
    ManifestEntry,
    add_wheel,
    check_room,
    load_manifest,
    open_for_writing,
    read_settled,
    replace_dependencies,
)
from patchkit.wheel.wheelhouse.verify import check_files, prune_wheelhouse
from support import write_files
from support.faults import in_child, kill
from support.filling import contents, kinds
from support.wheels import CPU, write_wheel

FACTS = {"target": "gb10"}
OURS, NEWER = "2.29.7+gb10.abc123", "2.29.7+gb10.def456"


@pytest.fixture
def ways(tmp_path, made):
    """Changes of a wheelhouse: (what is there before, the change), by name."""
    old, other = made(OURS, files={"a": b"1"}), made("1.0", project="vllm")
    twin = write_wheel(tmp_path / "twin", OURS, files={"a": b"2"})
    stray = write_wheel(tmp_path / "stray", "1.0", project="stray")
    stock = [write_wheel(tmp_path / "aside", f"{n}.0", project="torch") for n in (1, 2)]

    def filled(house, wheel):
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        name, size = WheelName(wheel.name), wheel.stat().st_size
        fresh = ManifestEntry(
            name=name, sha256=digest, size=size, facts={}, kind=Kind.DEPENDENCY
        )
        replace_dependencies(house, read_settled(house), [fresh], [wheel])

    def filled_before(house):
        add_wheel(house, other, {})
        filled(house, stock[0])

    def stray_there(house):
        add_wheel(house, old, FACTS)
        add_wheel(house, other, {})
        shutil.copy(stray, house)

    return {
        "first": (lambda house: None, lambda house: add_wheel(house, old, FACTS)),
        "same name": (
            lambda house: add_wheel(house, old, {}),
            lambda house: add_wheel(house, twin, FACTS),
        ),
        "prune": (stray_there, lambda house: prune_wheelhouse(house, drop=["vllm"])),
        "fill": (filled_before, lambda house: filled(house, stock[1])),
    }


@pytest.fixture(params=["first", "same name", "prune", "fill"])
def before(request, ways, house):
    """What was there before a change that was killed right after its point of no return."""
    prepare, change = ways[request.param]
    house.mkdir()
    prepare(house)
    there = contents(house), kinds(house)

    def hook(event, arguments):
        if event == "os.rename" and str(arguments[1]).endswith("/manifest.json"):
            kill()

    assert in_child(lambda: change(house), hook) == -signal.SIGKILL
    return there


def test_cut_short_it_is_told_and_taken_back(before, house):
    for action in (
        load_manifest,
        check_files,
        lambda house: prune_wheelhouse(house, dry_run=True),
    ):
        with pytest.raises(StorageError, match="cut short in mid-commit") as caught:
            action(house)
    assert (
        caught.value.hint
        == f"take it back first: patchkit wheelhouse prune --dir {house}"
    )
    with open_for_writing(house):
        pass
    assert (contents(house), kinds(house)) == before


@pytest.mark.parametrize("earlier", [[], [".journal.damaged/.journal/back.json"]])
@pytest.mark.usefixtures("before")
def test_the_hint_sets_a_damaged_journal_aside(house, earlier):
    write_files(house, dict.fromkeys(earlier, "damaged before"))
    (house / ".journal/back.json").write_bytes(b"damaged")
    with pytest.raises(StorageError, match="cannot be understood") as caught:
        prune_wheelhouse(house)
    move, _and, prune = caught.value.hint.partition(" && ")
    assert prune == f"patchkit wheelhouse prune --dir {house}"
    subprocess.run(shlex.split(move), check=True)
    assert (house / ".journal.damaged/back.json").read_bytes() == b"damaged"
    prune_wheelhouse(house)
    assert kinds(house) == []
    assert not (house / ".journal").exists()


@pytest.mark.parametrize(
    "name", ["../precious", "/etc/precious", "a/b.whl", "precious", ".x"]
)
def test_a_journal_from_elsewhere_deletes_nothing(name, house, tmp_path):
    """A wheelhouse that came with a journal names a file of somebody else's."""
    places = (tmp_path / "precious", house / "precious", house / ".x")
    step = {"path": name, "before": hashlib.sha256(b"mine").hexdigest(), "after": ""}
    journal = {"format": 1, "steps": [step], "folders": []}
    write_files(house, {".journal/back.json": json.dumps(journal)})
    write_files(tmp_path, dict.fromkeys(places, "mine"))
    with pytest.raises(StorageError, match="cannot be understood"):
        prune_wheelhouse(house)
    assert [place.read_text() for place in places] == ["mine"] * 3


def test_many_at_once(house, made):
    """None waits in vain, none overwrites what another one listed."""
    wheels = [made("1.0", project=f"p{number}") for number in range(6)]
    rivals = [made(f"2.{number}", project="q") for number in range(4)]
    children = []
    for wheel in [*wheels, *rivals]:
        children.append(os.fork())
        if children[-1] == 0:
            os._exit(in_child(partial(add_wheel, house, wheel, {})))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes[:6] == [0] * 6
    assert sorted(codes[6:]) == [0, 2, 2, 2]
    assert len(load_manifest(house).wheels) == 7
    assert check_files(house) == ()


def test_what_cannot_be_written_is_known_before_a_build(small_disk, tmp_path):
    disk = small_disk("size=1m")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    (tmp_path / "file").write_text("")
    for house in (disk, disk / "not/there", tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(
            StorageError, match=f"{house}: not a folder that can be written to"
        ):
            check_room(house, f"nvidia_nccl_cu13-{OURS}-py3-none-linux_aarch64.whl")
    assert check_room(tmp_path / "not/there", f"x-{OURS}-py3-none-any.whl") == ()
    assert not (tmp_path / "not").exists()


@pytest.fixture
def stocked(house, made):
    add_wheel(house, made(OURS), FACTS)
    return house


@pytest.fixture
def elsewhere(tmp_path, stocked):
    """Replace a file of the wheelhouse by a link to the same bytes; return where they are."""

    def move(name):
        aside = tmp_path / "elsewhere" / name
        aside.parent.mkdir(exist_ok=True)
        shutil.move(stocked / name, aside)
        (stocked / name).symlink_to(aside)
        return aside

    return move


def fill(stocked, **more):
    where = NodePlatform(machine=CPU, python="3.12", glibc="2.39")
    options = {"also": (), "lock_only": False, "progress": print, "tell": print}
    fill_wheelhouse(stocked, where, **{**options, **more})


def test_a_wheel_that_is_a_link_to_the_same_bytes(stocked, elsewhere, cli, made):
    name = next(stocked.glob("*.whl")).name
    aside = elsewhere(name)
    kept = aside.read_bytes()

    said = cli("verify", stocked, rc=8).stdout

    assert f"✗ {name}  {LINKED}\n" in said
    assert f"next:  rm -- {stocked / name}; then build it again" in said
    with pytest.raises(HashMismatchError, match="is a link"):
        fill(stocked)
    add_wheel(stocked, made(OURS), FACTS)
    assert check_files(stocked) == ()
    assert not (stocked / name).is_symlink()
    assert aside.read_bytes() == kept


@pytest.mark.parametrize("name", ["SHA256SUMS", "requirements.txt"])
def test_a_document_that_is_a_link(name, stocked, elsewhere):
    aside = elsewhere(name)
    aside.chmod(0o600)
    kept = aside.read_bytes()
    assert kinds(stocked) == [(name, 8)]
    prune_wheelhouse(stocked)
    assert check_files(stocked) == ()
    assert not (stocked / name).is_symlink()
    assert aside.read_bytes() == kept


def test_a_manifest_that_is_a_link_is_not_read(stocked, elsewhere, made):
    aside = elsewhere("manifest.json")
    kept = aside.read_bytes()
    new = made("1.0", project="other")
    for action in (
        load_manifest,
        check_files,
        prune_wheelhouse,
        fill,
        lambda h: add_wheel(h, new, {}),
    ):
        with pytest.raises(
            HashMismatchError, match=r"manifest\.json: is a link"
        ) as caught:
            action(stocked)
        assert caught.value.hint
    assert (stocked / "manifest.json").is_symlink()
    assert aside.read_bytes() == kept
    assert not (stocked / new.name).exists()


def test_a_folder_of_downloads_that_is_a_link(stocked, tmp_path):
    aside = write_files(tmp_path / "elsewhere", {"pip/precious": ""})
    (stocked / ".filling").symlink_to(aside)
    assert kinds(stocked) == [(".filling", 7)]
    with pytest.raises(HashMismatchError, match=r"\.filling: is a link"):
        fill(stocked)
    prune_wheelhouse(stocked)
    assert check_files(stocked) == ()
    assert (aside / "pip" / "precious").exists()


def test_an_earlier_download_that_is_a_link_is_not_taken(
    stocked, tmp_path, monkeypatch
):
    """What .filling holds gets a second name in the wheelhouse: that of a link is a link."""
    offered = write_wheel(
        tmp_path / "offered", "1.0", project="other", tag="py3-none-any"
    )
    aside = shutil.copy(offered, tmp_path / "aside.whl")
    (stocked / ".filling").mkdir()
    (stocked / ".filling" / offered.name).symlink_to(aside)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(offered.parent))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    fill(stocked, also=["other"])
    assert not (stocked / offered.name).is_symlink()
    assert check_files(stocked) == ()
