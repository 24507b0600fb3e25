"""`patchkit model` on two nodes: real sshd and rsync; what a copy may and may not do to a node."""

import json
import os
import shutil
from pathlib import Path

import pytest

from patchkit.cluster.models.model_files import RECORD, ModelFolder
from patchkit.cluster.models.sync import place_model, stage_model
from patchkit.errors import StorageError
from support import write_files
from support.hub import CHOSEN, COMMIT, MODEL, SHARDS, digest
from support.needed import need
from support.ssh_server import obstacle, ssh_server

NODES = ("spark-1", "spark-2")
SPEC = "org/small"
FILES = {name: MODEL[name] for name in CHOSEN}
SIZES = {
    name: {"size": len(data), "digest": digest(data)} for name, data in FILES.items()
}
MADE = json.dumps({"repo": SPEC, "commit": COMMIT, "files": SIZES})
PLACE = f"models/{ModelFolder(repo=SPEC, commit=COMMIT).name}"


@pytest.fixture
def folders(tmp_path):
    """The model's folder on each node: the first one has it, as a fetch leaves it."""
    folders = [tmp_path / name / PLACE for name in NODES]
    folders[1].parents[1].mkdir()
    write_files(folders[0], {**FILES, RECORD: MADE})
    return folders


@pytest.fixture
def model(folders, cli, tmp_path):
    """Run `patchkit model VERB …`: what it printed."""
    need("rsync")
    if why := obstacle():
        pytest.skip(why)
    nodes = "".join(f'[[node]]\nssh = "{name}"\n' for name in NODES)
    (tmp_path / "cluster.toml").write_text(f'{nodes}[models]\n"{SPEC}" = "{COMMIT}"\n')
    homes = {name: tmp_path / name for name in NODES}
    with ssh_server(tmp_path / "ssh", *NODES, homes=homes) as path:

        def run(verb, *words, rc=0, env=None):
            done = cli("model", verb, *words, rc=rc, env={"PATH": path, **(env or {})})
            return done.stdout + done.stderr

        yield run


def held(folder):
    """Return the files of a folder, without what patchkit keeps of them."""
    files = (
        path
        for path in folder.rglob("*")
        if path.is_file() and ".cache" not in path.parts
    )
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def rot(path):
    """Change the last byte of a file, whose size and time stay."""
    kept, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(kept.st_atime_ns, kept.st_mtime_ns))


def test_sync_brings_all_and_then_nothing(model, folders):
    assert "spark-2: had it all" not in model("sync")
    assert (held(folders[1]), json.loads((folders[1] / RECORD).read_text())) == (
        FILES,
        json.loads(MADE),
    )
    assert "spark-2: had it all" in model("sync")
    assert [path.name for path in folders[1].parent.iterdir()] == [folders[1].name]


def test_a_folder_without_a_record_is_not_copied(model, folders):
    (folders[0] / RECORD).unlink()
    said = model("sync", rc=3)
    assert f"{folders[0]}/{RECORD}: is missing" in said
    assert f"patchkit model get {SPEC}" in said
    assert not folders[1].exists()


@pytest.mark.parametrize("there", [True, False], ids=["good copy", "no copy"])
def test_a_rotten_source_spoils_no_good_copy(model, folders, there):
    """The only one with the right bytes is the other node, or there is none."""
    if there:
        shutil.copytree(folders[0], folders[1])
    rot(folders[0] / SHARDS[0])
    if there:
        assert f"spark-1: {SHARDS[0]} has the hash" in (said := model("sync"))
        assert "the copy of spark-2 is taken" in said
        assert held(folders[0]) == held(folders[1]) == FILES
    else:
        said = model("sync", rc=8)
        assert f"spark-1: {folders[0]}/{SHARDS[0]}: has the hash" in said
        assert f"patchkit model get {SPEC}" in said
        assert not folders[1].exists()


@pytest.mark.parametrize("peer", ["", 'peer = "spark-1"'], ids=["no name", "a name"])
def test_this_machine_gets_a_good_copy_by_a_name_that_others_know(
    model, folders, tmp_path, peer
):
    """By `localhost` the other node would reach itself."""
    shutil.copytree(folders[0], folders[1])
    rot(folders[0] / SHARDS[0])
    rotten = held(folders[0])
    file = tmp_path / "cluster.toml"
    file.write_text(
        file.read_text().replace('ssh = "spark-1"', f'ssh = "localhost"\n{peer}')
    )
    home = {"HOME": str(tmp_path / "spark-1")}
    if peer:
        assert "the copy of spark-2 is taken" in model("sync", env=home)
        assert held(folders[0]) == FILES
    else:
        assert 'peer = "user@host"' in model("sync", rc=2, env=home)
        assert held(folders[0]) == rotten
    assert held(folders[1]) == FILES


def test_what_is_rotten_on_the_way_takes_nothing_away(model, folders, tmp_path):
    """A receiver whose disk, or memory, changes bytes: here its rsync does."""
    shutil.copytree(folders[0], folders[1])
    os.truncate(folders[1] / SHARDS[1], 5000)
    before = held(folders[1])
    write_files(
        tmp_path / "ssh/bin", {"rsync": spoiling(aside(folders[1]) / SHARDS[1])}, 0o755
    )
    assert "spark-2: " in (said := model("sync", rc=8))
    assert f"patchkit model sync {SPEC}" in said
    assert held(folders[1]) == before
    (tmp_path / "ssh/bin/rsync").unlink()
    model("sync")
    assert held(folders[1]) == FILES


def spoiling(file):
    """Return an rsync that adds a byte to a file once it has received it."""
    rsync = shutil.which("rsync")
    spoil = f'*--server*) {rsync} "$@" && printf x >> {file};;'
    return f'#!/bin/sh\ncase $* in {spoil} *) exec {rsync} "$@";; esac\n'


def aside(folder):
    return folder.parent / ".sync" / folder.name


def test_a_copy_that_was_cut_is_no_model_and_is_gone_on_with(model, folders):
    """As it lies when the worker lost power: a part of a shard, aside."""
    part = aside(folders[1]) / SHARDS[1]
    write_files(part.parent, {part.name: FILES[SHARDS[1]][:5000]})
    assert "spark-2" not in model("list").replace("spark-2: no models", "")
    assert f"spark-2: {SPEC} is not there" in model("check", SPEC, rc=3)
    model("sync")
    assert held(folders[1]) == FILES


def test_what_lies_aside_is_compared_by_its_bytes(model, folders):
    """Its size and time are right, and rsync alone would leave it as it is."""
    part = aside(folders[1]) / SHARDS[1]
    write_files(part.parent, {part.name: FILES[SHARDS[1]]})
    time = (folders[0] / SHARDS[1]).stat().st_mtime_ns
    os.utime(part, ns=(time, time))
    rot(part)
    model("sync")
    assert held(folders[1]) == FILES


def test_half_a_copy_of_an_earlier_patchkit_is_complete_nowhere(model, folders):
    """Without index and record, which rsync sent last."""
    write_files(
        folders[1], {"config.json": FILES["config.json"], SHARDS[0]: FILES[SHARDS[0]]}
    )
    assert "no record" in model("list")
    said = model("check", SPEC, rc=3)
    assert f"{RECORD}  is missing" in said
    assert f"patchkit model sync {SPEC}" in said
    model("sync")
    assert model("list").count("complete") == 2


def test_a_node_that_fails_ends_no_search_for_a_source(model, folders):
    shutil.copytree(folders[0], folders[1])
    (folders[0] / RECORD).unlink()
    said = model("sync")
    assert f"{RECORD} is missing" in said
    assert "the copy of spark-2 is taken" in said


def test_a_part_that_is_too_long_makes_no_room(tmp_path):
    """rsync shortens it only when its turn comes."""
    need("rsync")
    free = shutil.disk_usage(tmp_path).free
    name = ModelFolder(repo=SPEC, commit=COMMIT).name
    part = tmp_path / ".sync" / name / "part.txt"
    write_files(part.parent, {part.name: ""})
    os.truncate(part, 4 * free)
    files = {
        each: {"size": size, "digest": "0" * 64}
        for each, size in (("part.txt", 1), ("weights.txt", 2 * free))
    }
    record = {"repo": SPEC, "commit": COMMIT, "files": files}
    with pytest.raises(StorageError):
        list(stage_model(str(tmp_path), name, record))


def test_what_came_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    name = ModelFolder(repo=SPEC, commit=COMMIT).name
    staging, synced, fsync = tmp_path / ".sync" / name, [], os.fsync

    def note(handle):
        synced.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", note)
    write_files(staging, FILES)
    list(place_model(str(tmp_path), name, [*SIZES], json.loads(MADE)))
    assert held(tmp_path / name) == FILES
    last = max(synced.index(str(staging / each)) for each in FILES)
    assert last < synced.index(str(tmp_path / name))
    assert {str(tmp_path), str(tmp_path / name / ".cache")} <= {*synced}
