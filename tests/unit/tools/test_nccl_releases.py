"""Facts of NCCL's releases: where a distribution has them, and which one torch pins."""

from __future__ import annotations

from patchkit.patching.recipe import load_recipe
from patchkit.source.releases import load_facts
from patchkit.target import parse_arch

FACTS = load_facts()


def test_figures_of_a_release_are_complete():
    for release in FACTS.releases:
        assert release.tag == f"v{release.version}-1"
        assert len(release.sha256) in (0, 64)
        assert len(release.commit) in (0, 40)
        assert bool(release.sha256 or release.commit) == bool(release.figures)
        assert all(parse_arch(arch) for arch in release.archs)


def test_the_table_is_consistent():
    versions = [release.version for release in FACTS.releases]
    assert versions == sorted(set(versions))
    assert {FACTS.default, *(pin.version for pin in FACTS.torch.values())} <= set(versions)
    assert FACTS.known(FACTS.default).commit
    assert all(any(bug.covers(version) for version in versions) for bug in load_recipe("nccl").bugs)
    taken = {bug.take: bug for bug in load_recipe("nccl").bugs if bug.take}
    assert taken.keys() <= set(versions)
    assert not any(bug.covers(version) for version, bug in taken.items())
    digests = [release.sha256 for release in FACTS.releases if release.sha256]
    assert len(set(digests)) == len(digests)
    assert [str(v) for v in load_recipe("nccl").supported][:2] == ["2.26.2", "2.26.3"]
