"""Answer with the commit and the files of a repository, as ``process.ask`` has it.

It is run by the Python that has vLLM, hence huggingface_hub: REPO REVISION, "" for the newest. The
user's own token is found by huggingface_hub itself: HF_TOKEN, or what `hf auth login` stored.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def read_hub_facts(hub: Any, repo: str, revision: str) -> dict[str, Any]:
    """Return commit, and files with sizes and digests."""
    info = hub.HfApi().model_info(repo, revision=revision or None, files_metadata=True, timeout=30)
    files: dict[str, list[Any]] = {}
    for file in info.siblings or ():
        # Of a large file the sha256, of another git's sha1: what hf writes down as its ETag.
        files[file.rfilename] = [file.size, file.lfs.sha256 if file.lfs else file.blob_id]
    return {"commit": info.sha, "files": files}


if __name__ == "__main__":
    try:
        answer = read_hub_facts(importlib.import_module("huggingface_hub"), *sys.argv[1:])
    except Exception as error:  # noqa: BLE001 - it is the answer, and the other side knows what to do
        kinds = [kind.__name__ for kind in type(error).__mro__]
        answer = {"kinds": kinds, "says": str(error) or kinds[0]}
