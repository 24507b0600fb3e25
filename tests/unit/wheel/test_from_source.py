"""Read which backend builds vLLM: a broken pyproject.toml is an error of the source."""

import pytest

from patchkit.errors import SourceError
from patchkit.wheel.vllm.from_source import read_build_system

BACKEND = (
    '[build-system]\nrequires = ["ninja"]\nbuild-backend = "setuptools.build_meta"\n'
)


def test_the_backend_of_a_release(tmp_path):
    file = tmp_path / "pyproject.toml"
    file.write_text(f"{BACKEND}[project]\nname = 'vllm'\n")
    backend = read_build_system(file)
    assert (backend.name, backend.folders) == ("setuptools.build_meta", None)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"[build-system\n", "is not TOML"),
        (b"\xff", "is not TOML"),
        (b"", r"\[build-system\]: lacks the key 'build-backend'"),
        (b"build-system = 5\n", r"\[build-system\]"),
        (b"[build-system]\nbuild-backend = 5\n", "build-backend: is 5, not a text"),
        (None, "is missing"),
    ],
)
def test_a_broken_one_is_an_error_of_the_source(tmp_path, text, what):
    file = tmp_path / "pyproject.toml"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(SourceError, match=what):
        read_build_system(file)
