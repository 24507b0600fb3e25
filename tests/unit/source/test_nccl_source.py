"""What names sources of NCCL, and that nothing unverified gets through."""

import shutil
import tarfile
from dataclasses import replace

import pytest
from packaging.version import Version

from patchkit.cli.out import error_text
from patchkit.digests import tree_digest
from patchkit.errors import HashMismatchError, SourceError, StorageError, UsageError
from patchkit.patching.recipe import load_recipe
from patchkit.source.archive import unpack
from patchkit.source.detect import detect
from patchkit.source.releases import load_facts
from patchkit.source.resolve import find_origin
from support import write_files
from support.vllm_wheels import sha256

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FACTS = load_facts("nccl")
FILES = {
    "makefiles/version.mk": "NCCL_MAJOR   := 2\nNCCL_MINOR   := 30\nNCCL_PATCH   := 7\n"
    "NCCL_SUFFIX  :=\nPKG_REVISION := 1\n",
    "makefiles/common.mk": "NVCC_GENCODE ?= x\n",
    "src/Makefile": "all:\n",
    "src/nccl.h.in": "\n",
    "src/script.sh": "#!/bin/sh\n",
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PATCHKIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path):
    return write_files(tmp_path / "nccl", FILES)


@pytest.fixture
def repository(folder, git):
    """A local repository; its attributes would change what ``git archive`` and checkouts write."""
    write_files(
        folder, {".gitattributes": "*.sh export-ignore\n*.in export-subst eol=crlf\n"}
    )
    write_files(folder, {"src/nccl.h.in": "$Format:%H$\n"})
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "one")
    git(folder, "tag", "v2.30.7-1")
    return folder


@pytest.fixture
def commit(repository, git):
    return git(repository, "rev-parse", "HEAD").strip()


@pytest.fixture
def pack(folder, tmp_path):
    """An archive of the folder: ``pack("nccl.tar.xz", "xz")``."""

    def make(name, compression="gz"):
        path = tmp_path / name
        with tarfile.open(path, f"w:{compression}") as tar:
            tar.add(folder, arcname="nccl-2.30.7-1")
        return path

    return make


def test_the_makefiles_tell_the_version(folder):
    for suffix, version in (("", "2.30.7"), ("rc1", "2.30.7rc1")):
        text = FILES["makefiles/version.mk"].replace(
            "NCCL_SUFFIX  :=", f"NCCL_SUFFIX  := {suffix}"
        )
        write_files(folder, {"makefiles/version.mk": text})
        tree = detect(folder, "nccl")
        assert (str(tree.version), tree.kind, tree.project) == (
            version,
            "archive",
            "nccl",
        )
        found = find_origin("nccl", str(folder))
        assert (found.path, found.identity) == (
            folder,
            f"tree:sha256:{tree_digest(folder)}",
        )


@pytest.mark.parametrize(
    ("path", "text", "says"),
    [
        (
            "makefiles/version.mk",
            "NCCL_MAJOR := two\n",
            "does not tell the version: nothing is like .*NCCL_MAJOR",
        ),
        (
            "makefiles/common.mk",
            None,
            "not a source tree of NCCL: makefiles/common.mk is missing",
        ),
    ],
)
def test_a_folder_that_is_not_nccl(folder, path, text, says):
    (folder / path).unlink()
    write_files(folder, {path: text} if text else {})
    with pytest.raises(SourceError, match=says):
        detect(folder, "nccl")


def test_an_unknown_archive_needs_its_sha256(pack, tmp_path):
    path = pack("nccl.txz", "xz")
    with pytest.raises(SourceError, match=sha256(path)) as caught:
        find_origin("nccl", str(path))
    assert "NCCL 2.30.7" in caught.value.what
    assert f"--sha256 {sha256(path)}" in caught.value.hint
    assert f"git+{FACTS.upstream.git}@" in caught.value.hint

    origin = find_origin("nccl", str(path), sha256=sha256(path))

    assert (origin.identity, str(origin.version)) == (
        f"sha256:{sha256(path)}",
        "2.30.7",
    )
    assert (
        detect(unpack(origin.path, tmp_path / "out"), "nccl").version == origin.version
    )


@pytest.fixture
def know(monkeypatch):
    """Let the recipe know one release alone, with other figures, and another repository."""

    def change(version, git=FACTS.upstream.git, **figures):
        release = replace(FACTS.known(Version(version)), **figures)
        upstream = replace(FACTS.upstream, git=git)
        facts = replace(FACTS, releases=(release,), upstream=upstream)
        monkeypatch.setattr("patchkit.source.resolve.load_facts", lambda _: facts)

    return change


def test_an_archive_that_the_recipe_knows(pack, know):
    path = pack("any.tar.gz")
    know("2.30.7", sha256=sha256(path))
    assert find_origin("nccl", str(path)).identity == f"sha256:{sha256(path)}"
    know("2.29.7", sha256=sha256(path))
    with pytest.raises(
        SourceError, match=r"its files say 2\.30\.7, the recipe says 2\.29\.7"
    ):
        find_origin("nccl", str(path))


def test_a_commit_is_fetched_once_and_kept(repository, commit, tmp_path):
    spec = f"git+file://{repository}@{commit}"

    origin = find_origin("nccl", spec)

    assert (origin.identity, str(origin.version)) == (f"git:{commit}", "2.30.7")
    tree = unpack(origin.path, tmp_path / "out")
    texts = {
        path: (repository / path).read_bytes() for path in [*FILES, ".gitattributes"]
    }
    assert {path: (tree / path).read_bytes() for path in texts} == texts
    shutil.rmtree(repository)
    first = sha256(origin.path)
    again = find_origin("nccl", spec, offline=True)
    assert (again, sha256(again.path)) == (origin, first)


def test_users_settings_change_no_byte(repository, commit, tmp_path, monkeypatch):
    config = tmp_path / "gitconfig"
    config.write_text("[core]\n autocrlf = true\n eol = crlf\n[tar]\n umask = 0077\n")
    spec = f"git+file://{repository}@{commit}"
    plain = sha256(find_origin("nccl", spec).path)
    monkeypatch.setenv("PATCHKIT_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert sha256(find_origin("nccl", spec).path) == plain


@pytest.mark.parametrize("name", ["", "@main", f"@{COMMIT[:12]}"])
def test_a_name_is_no_identity(name):
    with pytest.raises(UsageError, match="is not a commit") as caught:
        find_origin("nccl", f"git+file:///nccl{name}")
    assert "40 hex digits" in caught.value.hint


def test_a_release_comes_from_upstreams_repository(repository, commit, know):
    know("2.30.7", git=f"file://{repository}", commit=commit)
    origin = find_origin("nccl", "nccl==2.30.7")
    assert (origin.identity, origin.version) == (f"git:{commit}", Version("2.30.7"))


def test_a_password_in_a_url_is_not_shown():
    spec = f"git+https://user:secret@localhost:1/nccl@{COMMIT}"
    with pytest.raises(StorageError, match="there is no network") as caught:
        find_origin("nccl", spec)
    assert "secret" not in error_text(caught.value)


def test_a_damaged_cache_is_noticed(repository, commit, cache):
    spec = f"git+file://{repository}@{commit}"
    find_origin("nccl", spec)
    kept = cache / "sources/git"
    found = [*kept.rglob("*.pack"), *kept.rglob("objects/??/" + "?" * 38)]
    data = bytearray(found[0].read_bytes())
    data[len(data) // 2] ^= 0xFF
    found[0].chmod(0o644)
    found[0].write_bytes(data)
    for offline in (True, False):
        with pytest.raises(HashMismatchError, match="is damaged") as caught:
            find_origin("nccl", spec, offline=offline)
        assert f"remove {kept / commit}" in caught.value.hint


@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        ("nccl==9.9", SourceError, "9.9 is not among the releases"),
        ("nccl==two", UsageError, "'two' is not a version"),
        (
            "nccl==2.29.2",
            SourceError,
            "2.29.2 could be had: the commit .* is not in the cache",
        ),
        ("nccl==2.28.3", SourceError, "2.28.3 is not supported"),
    ],
)
def test_releases_that_cannot_be_had(spec, error, says, cache):
    with pytest.raises(error, match=says):
        find_origin("nccl", spec, offline=True, check=load_recipe("nccl").check)
    assert not cache.exists()


def test_a_kept_release_is_looked_at_again(pack, cache, know):
    """What lies in the cache counts by its bytes; another file there is not taken."""
    path = pack("a.tar.gz")
    know("2.27.7", commit="", sha256=sha256(path))
    kept = cache / "sources/nccl-2.27.7.tar.gz"
    kept.parent.mkdir(parents=True)
    shutil.copy(path, kept)
    assert find_origin("nccl", "nccl==2.27.7", offline=True).path == kept
    kept.write_bytes(kept.read_bytes() + b"\0")
    with pytest.raises(SourceError, match="cannot be verified"):
        find_origin("nccl", "nccl==2.27.7", offline=True)
