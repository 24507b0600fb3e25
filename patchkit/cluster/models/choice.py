"""Choose the files of a repository that vLLM loads: gpt-oss has 65 GB of them, and 196 in all."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from patchkit.errors import SourceError

INDEXES = (
    "model.safetensors.index.json",
    "consolidated.safetensors.index.json",
    "pytorch_model.bin.index.json",
)
"""Files that name the shards of a model, the first one of which vLLM loads."""

CONFIGS = ("config.json", "params.json", "adapter_config.json")
"""Without any of them nothing can be loaded."""

# The same weights in forms that vLLM does not load, or for another program.
_ELSEWHERE = {"original", "metal", "onnx", "openvino", "coreml", "gguf", "flax", "runs"}
_TEXTS = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken", "*.spm", "*.yaml")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack")
# In this order: the first kind that is there is loaded, in the main folder alone.
_KINDS = ("*.safetensors", "consolidated*.safetensors", "*.bin", "*.pt")
_OF_TRAINING = {
    *("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"),
}


def chosen(names: Collection[str], shards: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """Return the files to fetch, sorted; ``shards`` are the files that each index names.

    Raises SourceError if an index names a file that is not there, and if there are no weights.
    """
    weights = set(_weights(names, shards))
    if not weights:
        held = sorted({PurePosixPath(each).suffix for each in names if _is_weight(each)})
        raise SourceError(
            "the repository has no weights that vLLM loads from a folder",
            why=f"it holds {', '.join(held) or 'no weights at all'}",
            hint="name the repository of the safetensors",
        )
    texts = (name for name in names if _is_text(name) and not _other_index(name, weights, shards))
    return tuple(sorted({*weights, *texts}))


def is_weight(name: str) -> bool:
    """Return whether a file holds weights that vLLM may load: it lies in the main folder."""
    return _is_weight(name) and "/" not in name


def _weights(names: Collection[str], shards: Mapping[str, Collection[str]]) -> Iterator[str]:
    for kind in _KINDS:
        found = [name for name in names if _is_kind(name, kind)]
        index = next((each for each in INDEXES if each in shards and _indexes(each, kind)), "")
        if index:
            if missing := set(shards[index]).difference(names):
                raise SourceError(
                    f"{index} names {min(missing)}, which the repository does not have",
                    why="it was uploaded in part",
                    hint="look at its other revisions, and name one: REPO@REVISION",
                )
            yield from shards[index]
            return
        if found:
            yield from found
            return


def _is_kind(name: str, kind: str) -> bool:
    if "/" in name or name in _OF_TRAINING or not fnmatchcase(name, kind):
        return False
    # Beside the others, consolidated ones are the same weights once more.
    return kind.startswith("consolidated") or not name.startswith("consolidated")


def _indexes(index: str, kind: str) -> bool:
    """Return whether an index is about weights of a kind."""
    return _is_kind(index.removesuffix(".index.json"), kind)


def _other_index(name: str, weights: set[str], shards: Mapping[str, Collection[str]]) -> bool:
    """Return whether a file is the index of weights that are left out."""
    return name in shards and not weights.issuperset(shards[name])


def _is_weight(name: str) -> bool:
    return any(fnmatchcase(name, each) for each in _WEIGHTS)


def _is_text(name: str) -> bool:
    *folders, last = name.split("/")
    hidden = any(each.startswith(".") for each in (*folders, last))
    return (
        not hidden
        and not _ELSEWHERE.intersection(folders)
        and any(fnmatchcase(last, each) for each in _TEXTS)
    )
