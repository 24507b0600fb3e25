"""What lies at a path, and reading from it."""

import re
from dataclasses import replace

import pytest
from packaging.version import Version

from patchkit.digests import digest
from patchkit.errors import AbsentError, DriftError, SourceError, UsageError
from patchkit.source.detect import (
    FORK,
    detect,
    dist_info,
    state_folder,
)
from patchkit.source.tree import first_existing
from support import write_files

SOURCES = ("setup.py", "CMakeLists.txt", "cmake/utils.cmake", "vllm/__init__.py")


def header(version, name="vllm"):
    return f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n\n# vLLM\nVersion: 9\n"


@pytest.fixture
def sources(tmp_path):
    return write_files(tmp_path / "src", dict.fromkeys(SOURCES, ""))


@pytest.fixture
def checkout(sources, git):
    """A repository of one commit with the tree in it."""
    git(sources, "init", "--quiet")
    git(sources, "add", "--all")
    git(sources, "commit", "--quiet", "--message", "first")
    return sources


@pytest.fixture
def installed(tmp_path):
    """site-packages with a vllm in it."""
    files = {
        "vllm/__init__.py": "",
        "vllm-0.19.1+cu130.dist-info/METADATA": header("0.19.1+cu130"),
        "vllm-0.19.1+cu130.dist-info/RECORD": "vllm/__init__.py,,\n",
        "vllm_flash_attn-2.7.dist-info/METADATA": header("2.7", "vllm-flash-attn"),
    }
    return write_files(tmp_path / "site-packages", files)


@pytest.mark.parametrize("version", ["0.19.1", "0.33.1.dev12+g123abc.cu130"])
def test_an_unpacked_sdist(sources, version, monkeypatch):
    write_files(sources, {"PKG-INFO": header(version)})
    tree = detect(sources, "vllm")
    assert (tree.root, tree.project, tree.kind) == (sources, "vllm", "sdist")
    assert tree.version == Version(version)
    assert state_folder(tree) == sources / ".patchkit"
    write_files(
        sources, {"PKG-INFO": f"Name: vllm\nVersion: {version}\nSummary: {FORK}\n"}
    )
    assert detect(sources, "vllm").kind == "archive"
    monkeypatch.setenv("SETUPTOOLS_SCM_PRETEND_VERSION_FOR_VLLM", "0.24.0")
    with pytest.raises(UsageError, match=f"is of {re.escape(version)}, not of 0.24.0"):
        detect(sources, "vllm")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"PKG-INFO": header("1.0", "torch")}, r"PKG-INFO: describes torch, not vllm"),
        ({"PKG-INFO": header("main")}, r"PKG-INFO: 'main' is not a version"),
        ({}, r"neither PKG-INFO nor \.git tells the version"),
    ],
)
def test_a_tree_without_a_version_is_refused(sources, files, message):
    write_files(sources, files)
    with pytest.raises(SourceError, match=message):
        detect(sources, "vllm")


@pytest.mark.parametrize(
    ("tag", "commits", "expected"),
    [("v0.33.0", 0, "0.33.0"), ("v0.23.0rc1", 2, "0.23.0rc2.dev2")],
)
def test_a_checkout_is_what_setuptools_scm_calls_it(
    checkout, git, tag, commits, expected
):
    git(checkout, "tag", "nightly")
    git(checkout, "tag", tag)
    for number in range(commits):
        git(
            checkout,
            "commit",
            "--allow-empty",
            "--quiet",
            "--message",
            f"more {number}",
        )
    commit = git(checkout, "rev-parse", "--short", "HEAD").strip()
    tree = detect(checkout, "vllm")
    assert str(tree.version) == (f"{expected}+g{commit}" if commits else expected)
    assert (tree.root, tree.kind) == (checkout, "git")


def test_a_checkout_without_version_tags_is_refused(checkout, git):
    git(checkout, "tag", "nightly")
    with pytest.raises(
        SourceError, match="git describe finds no version tag"
    ) as caught:
        detect(checkout, "vllm")
    assert caught.value.hint == f"git -C {checkout} fetch --tags --unshallow"
    assert "fatal: " in caught.value.why


def test_an_installed_package(installed):
    tree = detect(installed / "vllm", "vllm")
    assert (tree.root, tree.kind, tree.version) == (
        installed,
        "installed",
        Version("0.19.1+cu130"),
    )
    assert tree.exists("vllm/__init__.py")
    assert state_folder(tree) == installed / "vllm" / ".patchkit"
    assert (
        dist_info(tree.root, tree.project) == installed / "vllm-0.19.1+cu130.dist-info"
    )


@pytest.mark.parametrize(
    ("gone", "added", "message"),
    [
        (
            "vllm-0.19.1+cu130.dist-info",
            {},
            r"0 folders vllm-\*\.dist-info, expected 1",
        ),
        (
            "x",
            {"vllm-0.18.0.dist-info/METADATA": ""},
            r"2 folders vllm-\*\.dist-info, expected 1",
        ),
        ("vllm-0.19.1+cu130.dist-info/RECORD", {}, r"has no RECORD"),
    ],
)
def test_a_damaged_installation_is_refused(installed, gone, added, message):
    write_files(installed, {"x": "", **added})
    (installed / gone).rename(installed / "elsewhere")
    with pytest.raises(SourceError, match=message):
        detect(installed / "vllm", "vllm")


def test_reading_prefers_pending_to_upstream_to_the_disk(make_tree):
    tree = make_tree("0.19.1", {"a": "disk a", "b": "disk b", "c": "disk c"})
    tree = replace(tree, pristine={"a": "upstream a", "b": "upstream b"})
    tree = tree.with_texts({"a": "pending a"})
    assert [tree.read(path) for path in "abc"] == ["pending a", "upstream b", "disk c"]
    assert [tree.exists(path) for path in ("a", "c", "d")] == [True, True, False]
    assert first_existing(tree, ["d", "c", "a"]) == "c"
    with pytest.raises(AbsentError, match="d: not found, nor e"):
        first_existing(tree, ["d", "e"])
    known = {"b": digest("upstream b"), "c": digest("disk c"), "d": "", "e": ""}
    assert tree.seen == known


def test_a_file_that_patchkit_created_is_not_of_the_release(make_tree):
    tree = make_tree("0.19.1", {"sub/a": "disk a", "sub/b": "ours", "sub/c": "ours"})
    tree = replace(tree, pristine={"sub/b": None, "sub/c": None})
    assert [tree.find(f"sub/{name}") for name in "abd"] == ["disk a", None, None]
    assert tree.glob("sub/*") == ["sub/a"]
    with pytest.raises(DriftError, match=r"^sub/b: not found in "):
        tree.read("sub/b")
    assert tree.seen == {"sub/a": digest("disk a"), "sub/b": "", "sub/d": ""}
    pending = tree.with_texts({"sub/b": "new"})
    assert (pending.find("sub/b"), tree.find("sub/b")) == ("new", None)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"one\ntwo\r\n", r"^sub/a\.py:2: has CR line endings"),
        ("one\n\ngröße\n".encode("latin-1"), r"^sub/a\.py:3: not UTF-8"),
        (None, r"^sub/a\.py: not found in "),
    ],
)
def test_a_text_that_no_release_ships_is_refused(data, message, make_tree):
    tree = make_tree("0.19.1", {"sub/b.py": ""})
    if data is not None:
        (tree.root / "sub/a.py").write_bytes(data)
    with pytest.raises(DriftError, match=message):
        tree.read("sub/a.py")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("../outside", "leads out of"),
        ("/etc/hostname", "leads out of"),
        ("link.py", "link.py is a symbolic link to "),
        ("away/outside", "away is a symbolic link to "),
        ("dangling", "dangling is a symbolic link to nowhere"),
    ],
)
def test_no_path_leads_out_of_the_tree(path, message, make_tree, tmp_path):
    tree = make_tree("0.19.1", {"sub/a.py": "inside"})
    (tmp_path / "outside").write_text("somebody else's")
    (tree.root / "link.py").symlink_to(tmp_path / "outside")
    (tree.root / "away").symlink_to(tmp_path)
    (tree.root / "dangling").symlink_to("nowhere")
    with pytest.raises(SourceError, match=re.escape(message)):
        tree.read(path)
