"""Read which backend builds vLLM: a broken pyproject.toml is an error of the source."""

import sys
from pathlib import Path

import pytest

from patchkit.errors import SourceError
from patchkit.wheel.vllm.from_source import compile_wheel
from support import write_files


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[build-system\n", "is not TOML: .*line 1"),
        ("", "build-system: is missing"),
        ("build-system = 5\n", "build-system: is 5, not a table"),
    ],
)
def test_a_broken_one_is_an_error_of_the_source(tmp_path, text, what):
    write_files(tmp_path, {"source/pyproject.toml": text})
    with pytest.raises(SourceError, match=rf"source/pyproject\.toml: {what}"):
        compile_wheel(tmp_path, Path(sys.executable), {}, lambda _done, _total: None)
