"""Write an index over a wheelhouse: what it consists of, and where it cannot be written."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from urllib.parse import unquote
from zipfile import ZipFile

import pytest

from patchkit.digests import sha256_of
from patchkit.errors import HashMismatchError, PatchkitError, SourceError, UsageError
from patchkit.versions import ExactPin
from patchkit.wheel.index.write import write_index
from patchkit.wheel.wheelhouse.overriding import chosen, record
from patchkit.wheel.wheelhouse.prune import prune
from support.faults import killed_everywhere
from support.indexed import VLLM, Links, files
from support.wheels import write_wheel

# What is written


def test_pages_say_what_the_wheels_are(world, index, house, site):
    index()
    for wheel in house.glob("*.whl"):
        with ZipFile(wheel) as archive:
            metadata = archive.read(next(n for n in archive.namelist() if n.endswith("/METADATA")))
        (place,) = site.rglob(wheel.name)
        assert place.samefile(wheel)
        assert place.with_name(f"{wheel.name}.metadata").read_bytes() == metadata
        python = ">=3.8, <4" if wheel.name.startswith("Leaf") else None
        digest = hashlib.sha256(metadata).hexdigest()

        (link,) = Links((place.parent / "index.html").read_text()).found
        address, _, fragment = link["href"].partition("#")
        assert (unquote(address), fragment) == (wheel.name, f"sha256={sha256_of(wheel)}")
        assert "+" not in address
        assert link.get("data-requires-python") == python
        kinds = ("data-core-metadata", "data-dist-info-metadata")
        assert {link[kind] for kind in kinds} == {f"sha256={digest}"}

        page = json.loads((place.parent / "index.json").read_text())
        assert page["meta"] == {"api-version": "1.1"}
        assert page["name"] == place.parent.name
        (file,) = page["files"]
        assert file.pop("requires-python", None) == python
        assert file == {
            "filename": wheel.name,
            "url": address,
            "hashes": {"sha256": sha256_of(wheel)},
            "size": wheel.stat().st_size,
            "core-metadata": {"sha256": digest},
            "dist-info-metadata": {"sha256": digest},
        }
    projects = ["leaf-thing", "nvidia-nccl-cu13", "torch", "vllm"]
    root = Links((site / "simple/index.html").read_text())
    assert [link["href"] for link in root.found] == [f"{project}/" for project in projects]
    listed = json.loads((site / "simple/index.json").read_text())["projects"]
    assert listed == [{"name": project} for project in projects]
    check = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    subprocess.run(check, cwd=site, check=True)
    written = {line.split("  ")[1] for line in (site / "SHA256SUMS").read_text().splitlines()}
    assert written == files(site).keys() - {"SHA256SUMS"}


def test_the_same_wheels_give_the_same_bytes(held, index, site):
    for name, order in (("one", ("1.0", "2.0")), ("other", ("2.0", "1.0"))):
        for version in order:
            held(version, project=f"p{version[0]}", dir=name, tag="py3-none-any")
    index("one")
    first = files(site)
    assert index("other").new == ()
    shutil.rmtree(site)
    index("other")
    assert files(site) == first


def test_what_a_former_index_had_goes_and_nothing_else(world, index, cli, house, site):
    index()
    (site / "simple/torch/notes.txt").write_text("mine")
    (site / "robots.txt").write_text("mine")
    before = files(site)
    prune(house, drop=["torch", "vllm"])

    planned = json.loads(cli("wheelhouse", "index", "site", "--dry-run", "--json").stdout)
    assert files(site) == before
    done = cli("wheelhouse", "index", "site", "-v").stdout
    for path in planned["gone"]:
        assert f"- {path}\n" in done

    now = files(site)
    gone = before.keys() - now.keys()
    assert gone == {*planned["gone"]}
    assert len(gone) == 2 * 4
    assert {path for path, data in now.items() if before[path] != data} == {*planned["new"]}
    assert {*planned["new"]} == {"SHA256SUMS", "simple/index.html", "simple/index.json"}
    assert now["simple/torch/notes.txt"] == now["robots.txt"] == b"mine"
    assert not (site / "simple/vllm").exists()


@pytest.mark.parametrize("path", ["SHA256SUMS", "simple/index.html", "simple/vllm/index.json"])
def test_files_of_others_are_not_replaced(path, world, index, site):
    place = site / path
    place.parent.mkdir(parents=True)
    place.write_text(f"{'0' * 64}  ../vllm.whl\n")
    with pytest.raises(UsageError, match=f"site/{path}: is there, and no index of patchkit's"):
        index()
    assert list(files(site)) == [path]


def test_links_are_not_followed(world, index, house, site, tmp_path):
    wheel = next(house.glob("torch*"))
    aside = shutil.move(wheel, tmp_path / wheel.name)
    wheel.symlink_to(aside)
    with pytest.raises(HashMismatchError, match=r"torch.*: is a link"):
        index()
    assert not site.exists()

    wheel.unlink()
    shutil.move(aside, wheel)
    outside = tmp_path / "outside"
    outside.mkdir()
    site.mkdir()
    (site / "simple").symlink_to(outside)
    with pytest.raises(SourceError, match="simple is a symbolic link"):
        index()
    assert files(outside) == {}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda wheel: wheel.write_bytes(b"no zip"), "is not the wheel that is listed"),
        (lambda wheel: wheel.unlink(), "is listed, and not there"),
    ],
)
def test_wheels_that_are_not_as_listed(change, says, world, index, house, site):
    change(next(house.glob("vllm*")))
    with pytest.raises(PatchkitError, match=says):
        index()
    assert not site.exists()


def test_refusals(held, index, house, cli):
    house.mkdir()
    with pytest.raises(UsageError, match="wheelhouse: no wheels to offer"):
        index()
    with pytest.raises(UsageError, match="gone: no such folder"):
        index("gone")
    held(VLLM, project="vllm")
    assert "is the wheelhouse itself" in cli("wheelhouse", "index", "wheelhouse", rc=2).stderr
    held("0.25.1+cu130.gb10.ffffffffff", project="vllm", dir="other")
    with pytest.raises(UsageError, match="are two builds of one version") as refused:
        index("wheelhouse", "other")
    assert refused.value.why == "vllm==0.25.1 takes the one whose label sorts last"


def test_what_a_wheel_says_is_text_and_nothing_else(held, index, site):
    """A field that is no specifier is left out; one that is stays in its attribute."""
    held("1.0", project="a", tag="py3-none-any", python='>=3"><b>', requires=["="])
    held("1.0", project="b", tag="py3-none-any", python=">=3,<4")
    assert index().offers.lacking == ()
    assert b"><b>" not in files(site)["simple/a/index.html"]
    assert "requires-python" not in (site / "simple/a/index.json").read_text()
    (link,) = Links((site / "simple/b/index.html").read_text()).found
    assert link["data-requires-python"] == ">=3,<4"


def test_what_the_index_lacks_is_said(held, index, cli, tmp_path):
    """Of an index alone pip could not install it; of one with what fill brings, it can."""
    held("1.0", project="a", tag="py3-none-any", requires=["B_b>1", "c; python_version < '3'"])
    said = cli("wheelhouse", "index", "site").stdout
    assert "site/simple: wheels: 1," in said
    assert "note not in it, and required by what is: b-b (1)" in said
    assert said.splitlines()[-1].endswith("wheelhouse fill --dir wheelhouse")
    write_wheel(tmp_path / "offered", "2.0", project="b-b", tag="py3-none-any")
    fill = ["wheelhouse", "fill", "--offline", "--find-links", "offered", "--cpu", "aarch64"]
    cli(*fill, "--lock-only")
    assert index().offers.lacking == ("b-b",)
    cli(*fill)
    assert index().offers.lacking == ()


def test_with_an_override_pip_is_given_the_lock(held, house, cli):
    held("2.11.0", project="torch", requires=["nvidia-nccl-cu13==2.28.9"])
    record(house, chosen(house, ExactPin("nvidia-nccl-cu13==2.30.7")))
    held("2.30.7+gb10.abc123")
    said = cli("wheelhouse", "index", "site").stdout
    assert "/simple/ --no-deps --require-hashes -r requirements.txt" in said


# Interrupted, and without room


def test_killed_anywhere(held, site, tmp_path):
    """What a page names is there at any moment, and the next run finishes what was begun."""
    for name, version in (("old", "1.0"), ("new", "2.0")):
        held(version, project="a", dir=name, tag="py3-none-any")
        held("1.0", project=f"only-{name}", dir=name, tag="py3-none-any")
    wanted = tmp_path / "wanted"
    write_index(wanted, [tmp_path / "new"])

    def prepare():
        shutil.rmtree(site, ignore_errors=True)
        write_index(site, [tmp_path / "old"])

    count = 0
    for _ in killed_everywhere(lambda: write_index(site, [tmp_path / "new"]), prepare, step=9):
        for page in site.glob("simple/*/index.json"):
            for file in json.loads(page.read_text())["files"]:
                assert sha256_of(page.with_name(file["filename"])) == file["hashes"]["sha256"]
        write_index(site, [tmp_path / "new"])
        assert files(site) == files(wanted)
        assert not (site / "simple/only-old").exists()
        count += 1
    assert count > 5


def test_on_another_disk_and_on_a_full_one(small_disk, world, cli, house, tmp_path):
    large, small = (small_disk(f"size={size}") / "site" for size in ("2m", "64k"))
    cli("wheelhouse", "index", large)
    wheel = next(house.glob("vllm*"))
    (copy,) = large.rglob(wheel.name)
    assert copy.read_bytes() == wheel.read_bytes()
    assert not copy.samefile(wheel)
    assert "No space left on device" in cli("wheelhouse", "index", small, rc=7).stderr
    assert files(small) == {}
