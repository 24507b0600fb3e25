"""Links in a wheelhouse: found, refused, and never followed."""

from __future__ import annotations

import shutil

import pytest

from patchkit.errors import HashMismatchError
from patchkit.wheel.wheelhouse.contents import add_wheel, load_manifest
from patchkit.wheel.wheelhouse.fill import fill_wheelhouse
from patchkit.wheel.wheelhouse.prune import prune_wheelhouse
from patchkit.wheel.wheelhouse.resolve import NodePlatform, WheelSources
from patchkit.wheel.wheelhouse.storage import LINKED
from patchkit.wheel.wheelhouse.verify import check_files
from support.wheels import CPU, write_wheel

OURS = "2.29.7+gb10.abc123"
DOCUMENTS = ["SHA256SUMS", "requirements.txt"]


@pytest.fixture
def house(tmp_path):
    folder = tmp_path / "wheelhouse"
    add_wheel(folder, write_wheel(tmp_path / "made", OURS), {"target": "gb10"})
    return folder


@pytest.fixture
def elsewhere(tmp_path, house):
    """Replace a file of the wheelhouse by a link to the same bytes; return where they are."""

    def move(name):
        aside = tmp_path / "elsewhere" / name
        aside.parent.mkdir(exist_ok=True)
        shutil.move(house / name, aside)
        (house / name).symlink_to(aside)
        return aside

    return move


def fill(house, *folders, **more):
    where = NodePlatform(machine=CPU, python="3.12", glibc="2.39")
    fill_wheelhouse(house, where, WheelSources(offline=True, folders=folders), **more)


def found(house):
    return {each.where: (each.kind.exit_code, each.what) for each in check_files(house)}


def test_a_wheel_that_is_a_link_to_the_same_bytes(house, elsewhere, cli, tmp_path):
    name = next(house.glob("*.whl")).name
    aside = elsewhere(name)
    kept = aside.read_bytes()

    said = cli("verify", house, rc=8).stdout

    assert f"✗ {name}  {LINKED}\n" in said
    assert f"next:  rm -- {house / name}; then build it again" in said
    with pytest.raises(HashMismatchError, match="is a link"):
        fill(house)
    add_wheel(house, write_wheel(tmp_path / "made", OURS), {"target": "gb10"})
    assert found(house) == {}
    assert not (house / name).is_symlink()
    assert aside.read_bytes() == kept


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_that_is_a_link(name, house, elsewhere):
    aside = elsewhere(name)
    aside.chmod(0o600)
    kept = aside.read_bytes()
    assert [(code, "is a link" in what) for code, what in found(house).values()] == [(8, True)]
    prune_wheelhouse(house)
    assert found(house) == {}
    assert not (house / name).is_symlink()
    assert aside.read_bytes() == kept


def test_a_manifest_that_is_a_link_is_not_read(house, elsewhere, tmp_path):
    aside = elsewhere("manifest.json")
    kept = aside.read_bytes()
    new = write_wheel(tmp_path / "made", "1.0", project="other")
    for action in (
        *(load_manifest, check_files, prune_wheelhouse, lambda house: add_wheel(house, new, {})),
        fill,
    ):
        with pytest.raises(HashMismatchError, match=r"manifest\.json: is a link") as caught:
            action(house)
        assert caught.value.hint
    assert (house / "manifest.json").is_symlink()
    assert aside.read_bytes() == kept
    assert not (house / new.name).exists()


def test_a_folder_of_downloads_that_is_a_link(house, tmp_path):
    aside = tmp_path / "elsewhere"
    (aside / "pip").mkdir(parents=True)
    (aside / "pip" / "precious").touch()
    (house / ".filling").symlink_to(aside)
    assert found(house)[".filling"][0] == 7
    with pytest.raises(HashMismatchError, match=r"\.filling: is a link"):
        fill(house)
    prune_wheelhouse(house)
    assert found(house) == {}
    assert (aside / "pip" / "precious").exists()


def test_an_earlier_download_that_is_a_link_is_not_taken(house, tmp_path, monkeypatch):
    """What .filling holds gets a second name in the wheelhouse: that of a link is a link."""
    offered = write_wheel(tmp_path / "offered", "1.0", project="other", tag="py3-none-any")
    aside = shutil.copy(offered, tmp_path / "aside.whl")
    (house / ".filling").mkdir()
    (house / ".filling" / offered.name).symlink_to(aside)
    for name in ("PIP_CONFIG_FILE", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(name, "/dev/null" if name == "PIP_CONFIG_FILE" else "")
    fill(house, offered.parent, also=["other"])
    assert not (house / offered.name).is_symlink()
    assert found(house) == {}
