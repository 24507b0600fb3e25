"""The build environment: what a file of requirements may say, and what becomes of it."""

import hashlib
from pathlib import Path

import pytest

from patchkit.errors import BuildError, BusyError, SourceError, StorageError
from patchkit.wheel.build.requirements import (
    made_once,
    make_environment,
    read_requirements,
)
from patchkit.wheel.file.torch import InstalledTorch, installed_torch, require_torch
from support.wheels import write_wheel

DIGEST = "0" * 64
TORCH = "__version__ = '2.11.0+cu130'\nclass version:\n    cuda = {cuda!r}\n"


def test_an_environment_is_made_once(tmp_path, monkeypatch):
    """Of requirements for a torch that is one module, in a folder that pip knows."""
    files = {"torch/__init__.py": TORCH.format(cuda="13.0").encode()}
    links = tmp_path / "links"
    wheel = write_wheel(
        links, "2.11.0", project="torch", tag="py3-none-any", files=files
    )
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    requirements = tmp_path / "torch.txt"
    requirements.write_text(
        f"# all of it\ntorch==2.11.0 \\\n    --hash=sha256:{found}\n"
    )
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    told = []
    # Neither where pip would put packages nor another torch is the user's to say.
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "elsewhere"))
    (tmp_path / "other/torch").mkdir(parents=True)
    (tmp_path / "other/torch/__init__.py").write_text(
        "raise SystemExit('the wrong torch')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    options = {"leaving": (), "offline": True, "progress": lambda *n: told.append(n)}
    made = make_environment(requirements, tmp_path / "e", **options)
    assert made.packages == {"torch": "2.11.0"}
    assert told[-1] == (1, 1)
    assert installed_torch(made.python) == InstalledTorch(
        python=made.python, version="2.11.0+cu130", cuda="13.0"
    )
    module = next(
        made.python.parents[1].glob("lib/python*/site-packages/torch/__init__.py")
    )
    module.write_text(TORCH.format(cuda=None))
    again = make_environment(requirements, tmp_path / "e", **options)
    assert again == made
    # It was not made anew, so the change is still there, and is what the check is for.
    with pytest.raises(BuildError, match="no CUDA: it is for CPUs alone"):
        require_torch(installed_torch(again.python), "2.11.0", "13.0")


def test_two_builds_do_not_make_the_same_folder(tmp_path):
    """What an ended one left goes first; whoever comes meanwhile is told."""
    home, part = tmp_path / "made", tmp_path / "made/part"
    (home / "half").mkdir(parents=True)
    (home / "half-link").symlink_to(tmp_path)

    with made_once(home, part) as is_empty:
        assert is_empty
        assert list(home.iterdir()) == []
        with pytest.raises(BusyError), made_once(home, part):
            pass
        part.touch()
    assert sorted(path.name for path in home.iterdir()) == [
        "part",
        "patchkit-environment",
    ]
    with made_once(home, part) as is_empty:
        assert not is_empty


@pytest.mark.parametrize(
    ("version", "cuda", "fine"),
    [
        ("2.11.0+cu132", "13.2", True),
        ("2.11.0", "13.4", True),
        ("2.11.0+cu130", "13.0", False),  # older than nvcc
        ("2.11.0+cu128", "12.8", False),
        ("2.11.1+cu132", "13.2", False),
    ],
)
def test_torch_must_be_the_release_with_that_cuda(version, cuda, fine):
    found = InstalledTorch(python=Path("/venv/bin/python"), version=version, cuda=cuda)
    if fine:
        return require_torch(found, "2.11.0", "13.2")
    with pytest.raises(BuildError, match=f"before the build, torch is {version[:6]}"):
        require_torch(found, "2.11.0", "13.2")
    return None


def test_other_lines_and_packages_without_a_hash_are_refused(tmp_path):
    path = tmp_path / "x.txt"
    for line in (
        "torch",
        "torch>=2",
        "torch @ file:///x",
        "-r other.txt",
        "torch==1 ; y ;",
    ):
        path.write_text(f"{line} --hash=sha256:{DIGEST}\n")
        with pytest.raises(SourceError, match="is not NAME==VERSION with --hash"):
            read_requirements(path)
    path.write_text("torch==2.11.0\n")
    with pytest.raises(SourceError, match="torch has no --hash"):
        make_environment(
            path, tmp_path / "e", leaving=(), offline=False, progress=print
        )
    with pytest.raises(StorageError, match="cannot be read"):
        read_requirements(tmp_path / "none.txt")
