"""Probe the machine that runs the tests, and what `--save` keeps of one and `--root` gives back."""

from __future__ import annotations

import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from patchkit.errors import HostError, SourceError, UsageError
from patchkit.runtime.host.machine_root import RecordingWriter
from patchkit.runtime.host.probe import probe
from support.needed import need


def seen(root, **options):
    return probe(root, environment={}, **options)


def test_this_machine_saved_packed_and_unpacked(tmp_path):
    found = probe(environment={}, copy=RecordingWriter(Path("/"), tmp_path / "saved"))
    assert "lo" in [each.name for each in found.netdevs]
    with tarfile.open(tmp_path / "saved.tar", "w") as archive:
        archive.add(tmp_path / "saved", "elsewhere")
    shutil.rmtree(tmp_path / "saved")
    with tarfile.open(tmp_path / "saved.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    assert seen(tmp_path / "elsewhere") == replace(found, software=None)


def test_what_is_no_recording_is_refused(copied, tmp_path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(UsageError, match="not empty"):
        RecordingWriter(Path("/"), tmp_path)
    (copied / "recording.json").write_text('{"errors": 3}')
    with pytest.raises(SourceError, match=r"recording\.json"):
        seen(copied)


def test_this_machine_has_addresses_if_ip_is_here(tmp_path, monkeypatch):
    need("ip")
    found = probe(environment={}).netdev("lo").addresses
    assert ("127.0.0.1", 8) in [(each.address, each.prefix) for each in found]
    monkeypatch.setenv("PATH", str(tmp_path))
    notes = probe(environment={}).notes
    assert any("no addresses: ip: " in note and "install iproute2" in note for note in notes)


def test_a_python_that_does_not_start(tmp_path):
    """A note where it was found by chance, an error where it was asked for."""
    broken = tmp_path / "python3"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    found = probe(environment={"PATH": str(tmp_path)})
    assert found.software is None
    assert found.notes[-1].startswith(f"no Python tells what is installed: {broken}: exit code 3")
    with pytest.raises(HostError, match="exit code 3"):
        probe(python=str(broken), environment={})
