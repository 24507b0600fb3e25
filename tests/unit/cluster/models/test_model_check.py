"""Damage models and check them: each damage has its finding, and a whole model has none."""

import json
import os
from pathlib import Path

import pytest

from patchkit.cluster.models.model_files import (
    RECORD,
    ModelCheck,
    ModelFile,
    ModelFolder,
    check_model,
    hash_findings,
    held_models,
    quick_check,
    require_record,
)
from patchkit.cluster.ssh.node import Remote
from support import write_files
from support.hub import CHOSEN, COMMIT, MODEL, SHARDS, digest

FILES = {name: MODEL[name] for name in CHOSEN}
INDEX = "model.safetensors.index.json"
ODD = '{"weight_map": {"w": "../../x.safetensors"}}'
LENGTH = len(FILES[SHARDS[1]])
HEADER = int.from_bytes(FILES[SHARDS[1]][:8], "little")


@pytest.fixture
def models(tmp_path):
    """A folder of models with one in it, as a fetch leaves it."""
    folder = tmp_path / ModelFolder(repo="org/small", commit=COMMIT).name
    files = {
        name: {"size": len(data), "digest": digest(data)}
        for name, data in FILES.items()
    }
    made = {"repo": "org/small", "commit": COMMIT, "files": files}
    write_files(folder, {**FILES, RECORD: json.dumps(made)})
    return tmp_path


@pytest.fixture
def model(models):
    return next(models.iterdir())


def checked(folder, *, full):
    check = quick_check(folder)
    if full:
        check = Remote("localhost").follow(
            ModelCheck, lambda *_: None, check_model, folder=str(folder)
        )
    return check, {
        f"{found.level}: {found.where}: {found.what}" for found in check.findings
    }


def test_a_whole_model_has_no_findings_and_is_listed(models, model):
    check, findings = checked(model, full=True)
    assert (findings, check.exit_code) == (set(), 0)
    size = sum(map(len, FILES.values()))
    assert (check.repo, check.commit, check.files, check.size) == (
        "org/small",
        COMMIT,
        5,
        size,
    )
    (models / "notes").mkdir()
    (held,) = held_models(str(models))
    assert (held.folder, held.full, held.size) == (str(model), False, size)


def dangle(folder):
    (folder / SHARDS[0]).unlink()
    (folder / SHARDS[0]).symlink_to("../../blobs/0123")


def fifo(folder):
    (folder / SHARDS[0]).unlink()
    os.mkfifo(folder / SHARDS[0])


@pytest.mark.parametrize("fetched", [True, False], ids=["fetched", "by hand"])
@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (dangle, f"{SHARDS[0]}: is a link to nothing, or no file"),
        (fifo, f"{SHARDS[0]}: is a link to nothing, or no file"),
        (lambda m: (m / SHARDS[1]).unlink(), f"{SHARDS[1]}: is missing"),
        (lambda m: (m / "config.json").unlink(), "config.json: is missing"),
        (
            lambda m: (m / INDEX).write_text(ODD),
            f"{INDEX}: w: is '../../x.safetensors', which is no plain name of a file",
        ),
    ],
    ids=["dangling link", "FIFO", "shard", "config", "index"],
)
def test_each_damage_is_found_without_hashing(model, damage, found, fetched):
    damage(model)
    if not fetched:
        (model / RECORD).unlink()
    assert f"error: {found}" in checked(model, full=False)[1]


def test_a_file_that_was_cut_off(model):
    os.truncate(model / SHARDS[1], 5000)
    expected = {f"error: {SHARDS[1]}: has 5,000 bytes, not {LENGTH:,}"}
    assert checked(model, full=False)[1] == expected


HALF = FILES[SHARDS[1]][:5000]


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (HALF, f"has 5,000 bytes, not {LENGTH:,}"),
        (FILES[SHARDS[1]] + b"more", f"has {LENGTH + 4:,} bytes, not {LENGTH:,}"),
        (FILES[SHARDS[1]][:20], "is cut off, or no file of safetensors"),
        (FILES[SHARDS[1]][: 8 + HEADER - 1], "is cut off, or no file of safetensors"),
        (bytes(LENGTH), "is cut off, or no file of safetensors"),
        (b"", "is cut off, or no file of safetensors"),
        (b"\2" + bytes(7) + b"[]", "is cut off, or no file of safetensors"),
    ],
    ids=["half", "longer", "header", "header's end", "zeros", "empty", "list"],
)
def test_without_a_record_the_header_tells_how_long_a_file_is(model, data, found):
    (model / RECORD).unlink()
    assert f"error: {SHARDS[1]}: {found}" not in checked(model, full=False)[1]
    (model / SHARDS[1]).write_bytes(data)
    assert f"error: {SHARDS[1]}: {found}" in checked(model, full=False)[1]


def test_a_folder_without_a_record_is_not_complete(model):
    whole = check_model_of(model)
    (model / RECORD).unlink()
    bare = check_model_of(model)
    assert (whole.complete, bare.complete, bare.exit_code) == (True, False, 0)
    second = require_record(bare)
    assert (require_record(whole), second.exit_code) == (whole, 3)
    assert second.findings[-1].where == RECORD


def check_model_of(folder):
    (check,) = held_models(str(folder.parent))
    return check


@pytest.mark.parametrize(
    "name", [SHARDS[1], "config.json"], ids=["sha256", "git's sha1"]
)
def test_other_bytes_of_the_same_length_are_found_by_the_hash(model, name):
    data = bytearray(FILES[name])
    data[-2] ^= 1
    (model / name).write_bytes(data)
    assert checked(model, full=False)[1] == set()
    check, (found,) = checked(model, full=True)
    assert check.exit_code == 8
    assert found.startswith(f"error: {name}: has the hash ")
    assert found.endswith(f"not {digest(FILES[name])[:16]}…")


def test_a_file_that_cannot_be_read_is_not_told_as_other_bytes(model):
    """Nothing lies at the first byte of a process: reading it fails for root, too."""
    made = json.loads((model / RECORD).read_text())
    made["files"]["notes.txt"] = {"size": 0, "digest": "0" * 64}
    (model / RECORD).write_text(json.dumps(made))
    (model / "notes.txt").symlink_to("/proc/self/mem")
    check, findings = checked(model, full=True)
    assert findings == {"error: notes.txt: cannot be read: Input/output error"}
    assert check.exit_code == 3


def test_who_stops_hashing_waits_for_no_file(tmp_path):
    read, size = Path("/proc/self/io"), 8 << 30
    (tmp_path / "small").touch()
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", size)
    files = {
        "small": ModelFile(size=0, digest="0" * 64),
        "large": ModelFile(size=size, digest="0" * 64),
    }
    before = int(read.read_text().split()[1])
    hashing = hash_findings(tmp_path, files)
    assert next(hashing) == (0, size)
    hashing.close()
    assert int(read.read_text().split()[1]) - before < size


@pytest.mark.parametrize("full", [True, False])
def test_weights_without_a_hash_are_not_called_checked(model, full):
    (model / "more.safetensors").write_bytes(FILES[SHARDS[0]])
    unknown = "was not fetched by patchkit: no hash is known"
    assert checked(model, full=full)[1] == {f"unknown: more.safetensors: {unknown}"}
    (model / RECORD).unlink()
    assert checked(model, full=full)[1] == {f"unknown: : {unknown}"}


def test_a_record_that_leads_elsewhere_is_refused(model):
    text = (model / RECORD).read_text()
    (model / RECORD).write_text(text.replace("config.json", "../x.json"))
    check, findings = checked(model, full=True)
    assert check.exit_code == 3
    assert any("no plain name of a file" in found for found in findings)
