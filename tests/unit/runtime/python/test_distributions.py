"""Find what an environment imports from: its own folders, and what its Python adds to them."""

import sys
import venv
from pathlib import Path

from patchkit.cluster.agent.node_facts import python_contents
from patchkit.runtime.python.distributions import import_path


def installed(folder, project, version, *lines):
    home = folder / f"{project}-{version}.dist-info"
    home.mkdir(parents=True)
    (home / "METADATA").write_text("\n".join([f"Name: {project}", f"Version: {version}", *lines]))


def test_what_a_pth_file_adds_is_installed(tmp_path):
    place = tmp_path / "venv"
    venv.create(place, symlinks=True)
    (own,) = place.glob("lib/python3*/site-packages")
    installed(own, "vllm", "0.25.1", "Requires-Dist: regex")
    shared = tmp_path / "shared"
    installed(shared, "regex", "2026.1")
    (own / "shared.pth").write_text(f"{shared}\n")

    assert import_path(str(place))[0] == str(own)
    assert str(shared) in import_path(str(place))
    assert python_contents(str(place), None).versions["regex"] == "2026.1"


def test_an_environment_whose_python_does_not_run_has_its_own_folders(tmp_path):
    own = tmp_path / "lib" / "python3.12" / "site-packages"
    installed(own, "vllm", "0.25.1")
    assert import_path(str(tmp_path)) == [str(own)]
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(Path(sys.executable).resolve())  # another prefix: its folders are not this
    assert import_path(str(tmp_path)) == [str(own)]
    assert import_path("") == []
