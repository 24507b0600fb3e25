"""Values that the code of a vLLM lists; tests of releases hold that they are read as they stand."""

from __future__ import annotations

import pytest

from patchkit.errors import SourceError
from tools.release_values import read_values


def test_choices_in_an_unknown_form_are_an_error(tmp_path):
    (tmp_path / "envs.py").write_text(
        "import os\nenvironment_variables = {\n"
        '    "VLLM_MODE": env_with_choices("VLLM_MODE", "a", make()),\n}\n'
    )
    with pytest.raises(SourceError, match=r"envs\.py:3: choices in an unknown form"):
        read_values(tmp_path)
