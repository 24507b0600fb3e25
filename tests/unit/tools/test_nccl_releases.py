"""Facts of NCCL's releases: where a distribution has them, and which one torch pins."""

from __future__ import annotations

import shutil

import pytest

from patchkit.errors import HostError, SourceError, StorageError
from patchkit.patching.recipe import load_recipe
from patchkit.source.releases import load_facts
from patchkit.target import parse_arch
from support.debian import (
    DISTRIBUTIONS,
    PACKAGE,
    Mirror,
    mirrors,
    stanzas,
    upstream_archive,
)

FACTS = load_facts()

# The distribution


def test_archives_of_an_apt_configuration(tmp_path):
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    (tmp_path / "sources.list").write_text(
        "# deb http://commented/debian x main\n"
        "deb [arch=amd64 signed-by=/k] http://one/debian trixie main contrib\n"
        "deb-src http://one/debian trixie main\n"
    )
    (parts / "b.list").write_text("deb http://two/apt stable main # note\n")
    (parts / "c.sources").write_text(
        "Types: deb\n# a comment\nURIs: http://three/ubuntu\nSuites: noble noble-updates\n"
        "Components: main\n multiverse\n\nEnabled: no\nURIs: http://off\nSuites: x\n"
    )
    assert mirrors(tmp_path) == (
        Mirror("http://one/debian", "trixie"),
        Mirror("http://two/apt", "stable"),
        Mirror("http://three/ubuntu", "noble"),
        Mirror("http://three/ubuntu", "noble-updates"),
    )
    assert mirrors(tmp_path / "nothing") == ()


@pytest.fixture
def etc(tmp_path):
    """What /etc says of a system: ``etc("ubuntu", "noble", "http://host/ubuntu noble")``."""

    def make(name, codename, *lines):
        folder = tmp_path / "etc"
        (folder / "apt").mkdir(parents=True)
        (folder / "os-release").write_text(f'NAME="x"\nID={name}\nVERSION_CODENAME="{codename}"\n')
        listed = "".join(f"deb {line} main\n" for line in lines)
        (folder / "apt/sources.list").write_text(listed)
        return folder

    return make


NOWHERE = "http://localhost:1/archive"


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt")
@pytest.mark.parametrize(
    ("system", "error", "says"),
    [
        (("fedora", "40"), HostError, "no apt that would have nvidia-nccl: this is fedora"),
        (("debian", "trixie"), HostError, "no archive of trixie"),
        (("debian", "", f"{NOWHERE} sid"), HostError, "no archive of this system"),
        (("ubuntu", "noble", f"{NOWHERE} jammy"), HostError, "no archive of noble"),
        (("ubuntu", "noble", f"{NOWHERE} noble"), StorageError, r"no nvidia-nccl 2\.29\.7"),
        (("debian", "trixie", f"{NOWHERE} trixie"), StorageError, r"no nvidia-nccl 2\.29\.7"),
    ],
)
def test_a_machine_that_cannot_have_the_source_package(etc, tmp_path, system, error, says):
    with pytest.raises(error, match=says):
        upstream_archive(PACKAGE, "2.29.7", DISTRIBUTIONS, tmp_path, etc=etc(*system))


def test_paragraphs_of_a_control_file():
    text = "Package: a\nVersion: 1\nChecksums-Sha256:\n x 1 f\n\n\nPackage: b\n"
    assert stanzas(text) == [
        {"package": "a", "version": "1", "checksums-sha256": "x 1 f"},
        {"package": "b"},
    ]
    assert stanzas("") == []


# The facts


def test_figures_of_a_release_are_complete():
    for release in FACTS.releases:
        assert release.tag == f"v{release.version}-1"
        assert len(release.sha256) in (0, 64)
        assert len(release.commit) in (0, 40)
        assert release.verifiable == bool(release.figures)
        assert all(parse_arch(arch) for arch in release.archs)


def test_the_table_is_consistent():
    versions = [release.version for release in FACTS.releases]
    assert versions == sorted(set(versions))
    assert {FACTS.default, *(pin.version for pin in FACTS.torch.values())} <= set(versions)
    assert FACTS.known(FACTS.default).verifiable
    assert all(any(bug.covers(version) for version in versions) for bug in FACTS.bugs)
    taken = {bug.take: bug for bug in FACTS.bugs if bug.take}
    assert taken.keys() <= set(versions)
    assert not any(bug.covers(version) for version, bug in taken.items())
    digests = [release.sha256 for release in FACTS.releases if release.sha256]
    assert len(set(digests)) == len(digests)
    assert [str(v) for v in load_recipe("nccl").supported][:2] == ["2.26.2", "2.26.3"]


def test_every_tag_of_upstreams_repository_has_its_figures():
    """16 of them were planned from their real sources; 2.28.3 is refused with its reason."""
    cloned = [each for each in FACTS.releases if each.figures.startswith("upstream's repository")]
    assert [str(each.version) for each in (cloned[0], cloned[-1])] == ["2.26.2", "2.30.7"]
    assert all(each.sha256 and each.commit for each in cloned)
    recipe = load_recipe("nccl")
    planned = [each for each in cloned if each.read and not recipe.refuses(each.version)]
    (refused,) = (each for each in cloned if each not in planned)
    assert (len(cloned), len(planned), str(refused.version)) == (17, 16, "2.28.3")
    with pytest.raises(SourceError, match=r"2\.28\.3 is not supported"):
        recipe.check(refused.version)
