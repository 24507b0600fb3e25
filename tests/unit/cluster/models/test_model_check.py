"""Damage models and check them: each damage has its finding, and a whole model has none."""

import json
import os
import shutil
import time

import pytest

from patchkit.cluster.models.check import ModelCheck, check_model, held_models
from patchkit.cluster.models.expected import ModelFile, ModelRecord, write_record
from patchkit.cluster.models.names import ModelFolder
from patchkit.finding import worst
from patchkit.records import record
from support.hub import CHOSEN, COMMIT, MODEL, SHARDS, digest

FILES = {name: MODEL[name] for name in CHOSEN}
OTHER = "f" * 40
DOWNLOADS = ".cache/huggingface/download"


def note_download(folder, name, commit, digest):
    """Write down of a file what `hf download` does."""
    place = folder / DOWNLOADS / f"{name}.metadata"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"{commit}\n{digest}\n{time.time()}\n")


@pytest.fixture
def models(tmp_path):
    """A folder of models with one in it, as a fetch leaves it."""
    folder = tmp_path / ModelFolder(repo="org/small", commit=COMMIT).name
    folder.mkdir()
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
        note_download(folder, name, COMMIT, digest(data))
    files = {name: ModelFile(size=len(data), digest=digest(data)) for name, data in FILES.items()}
    write_record(folder, ModelRecord(repo="org/small", commit=COMMIT, files=files))
    return tmp_path


@pytest.fixture(params=[True, False], ids=["fetched", "by hand"])
def model(models, request):
    """With patchkit's record, and with what `hf download` leaves alone."""
    folder = next(models.iterdir())
    if not request.param:
        shutil.rmtree(folder / ".cache/patchkit")
    return folder


def checked(folder, *, full):
    *_, last = check_model(str(folder), full=full)
    check = record(ModelCheck, json.loads(json.dumps(last["result"])))
    assert check.exit_code == worst(check.findings) or any(f.about for f in check.findings)
    return check, {f"{found.level}: {found.where}: {found.what}" for found in check.findings}


@pytest.mark.parametrize("full", [True, False])
def test_a_whole_model_has_no_findings(model, full):
    check, findings = checked(model, full=full)
    assert findings == set()
    assert (check.repo, check.files, check.size) == ("org/small", 5, sum(map(len, FILES.values())))


def cut(folder):
    os.truncate(folder / SHARDS[1], 5000)


def dangle(folder):
    (folder / SHARDS[0]).unlink()
    (folder / SHARDS[0]).symlink_to("../../blobs/0123")


def fifo(folder):
    (folder / SHARDS[0]).unlink()
    os.mkfifo(folder / SHARDS[0])


def other_commit(folder):
    place = folder / DOWNLOADS / "config.json.metadata"
    place.write_text(place.read_text().replace(COMMIT, OTHER))


LENGTH = len(FILES[SHARDS[1]])
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (cut, f"error: {SHARDS[1]}: has 5,000 bytes, not {LENGTH:,}"),
        (dangle, f"error: {SHARDS[0]}: is a link to nothing, or no file"),
        (fifo, f"error: {SHARDS[0]}: is a link to nothing, or no file"),
        (lambda folder: (folder / SHARDS[1]).unlink(), f"error: {SHARDS[1]}: is missing"),
        (lambda folder: (folder / "config.json").unlink(), "error: config.json: is missing"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "error: tokenizer.json: is missing"),
        (other_commit, "error: config.json: is of commit ffffffffffff, not 0123456789ab"),
    ],
    ids=["cut off", "dangling link", "FIFO", "shard", "config", "tokenizer", "two commits"],
)
def test_each_damage_is_found_without_hashing(model, damage, found):
    damage(model)
    assert found in checked(model, full=False)[1]


def test_an_index_that_leads_elsewhere_is_an_error(model):
    (model / INDEX).write_text('{"weight_map": {"w": "../../x.safetensors"}}')
    assert any(
        each.startswith(f"error: {INDEX}: names '../../x.safetensors'")
        for each in checked(model, full=False)[1]
    )


@pytest.mark.parametrize("name", [SHARDS[1], "config.json"], ids=["sha256", "git's sha1"])
def test_other_bytes_of_the_same_length_are_found_by_the_hash(model, name):
    data = bytearray(FILES[name])
    data[-2] ^= 1
    (model / name).write_bytes(data)
    assert checked(model, full=False)[1] == set()
    check, (found,) = checked(model, full=True)
    assert check.exit_code == 8
    assert found.startswith(f"error: {name}: has the hash ")
    assert found.endswith(f"not {digest(FILES[name])[:16]}…")


def test_a_pointer_of_git_lfs_is_no_weight(model):
    (model / SHARDS[0]).write_text("version https://git-lfs.github.com/spec/v1\n")
    (found,) = checked(model, full=False)[1]
    assert found.startswith(f"error: {SHARDS[0]}: ")


def test_a_part_of_a_download(model):
    (model / DOWNLOADS / "x.incomplete").write_bytes(b"1")
    level = "note" if (model / ".cache/patchkit").exists() else "error"
    found = f"{level}: {DOWNLOADS}/x.incomplete: a download was not finished"
    assert checked(model, full=False)[1] == {found}


def test_weights_without_a_hash_are_not_called_checked(model):
    shutil.rmtree(model / ".cache")
    unknown = {f"unknown: {name}: no hash of it was written down" for name in SHARDS}
    assert checked(model, full=True)[1] == unknown
    assert checked(model, full=False)[1] == {"unknown: : no hash of any file was written down"}


def test_a_record_that_leads_elsewhere_is_refused(models):
    folder = next(models.iterdir())
    place = folder / ".cache/patchkit/model.json"
    place.write_text(place.read_text().replace("config.json", "../config.json"))
    check, findings = checked(folder, full=True)
    assert not check.complete
    assert "no plain name of a file" in findings.pop()


def test_list(models):
    folder = next(models.iterdir())
    (models / "notes").mkdir()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    (model,) = held_models(str(models))
    expected = {"repo": "org/small", "commit": COMMIT, "size": size, "complete": True, "ours": True}
    assert model == {"folder": str(folder), **expected}
