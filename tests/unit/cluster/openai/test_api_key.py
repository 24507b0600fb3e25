"""Which key goes to which server."""

import pytest

from patchkit.cluster.openai.api_key import key_for
from patchkit.errors import UsageError
from support import write_files

HERE, ELSEWHERE = "http://127.0.0.1:8000", "http://spark-1:8000"


@pytest.mark.parametrize(
    ("url", "names", "expected"),
    [
        (HERE, "file vllm", "key-of-file"),
        (HERE, "vllm", "key-of-vllm"),
        ("http://localhost:1", "file", "key-of-file"),
        ("http://[::1]:1", "file", "key-of-file"),
        (ELSEWHERE, "file vllm", "key-of-vllm"),
        (ELSEWHERE, "file", ""),
        ("http://127.0.0.1.example:1", "file", ""),
        (HERE, "", ""),
    ],
)
def test_a_key_that_nobody_named(url, names, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if "vllm" in names:
        monkeypatch.setenv("VLLM_API_KEY", "key-of-vllm")
    if "file" in names:
        write_files(tmp_path / ".config/patchkit", {"secrets.env": "VLLM_API_KEY=key-of-file\n"})
    assert key_for(url) == expected


def test_a_key_that_is_named(monkeypatch):
    monkeypatch.setenv("MINE", "key-of-mine")
    monkeypatch.setenv("VLLM_API_KEY", "key-of-vllm")
    assert key_for(ELSEWHERE, "MINE") == "key-of-mine"
    monkeypatch.setenv("MINE", "two\nlines")
    for name in ("MINE", "NOT_SET"):
        with pytest.raises(UsageError, match=f"{name} holds no key"):
            key_for(ELSEWHERE, name)
