"""Tell whether a file runs upstream's own vLLM, as far as it says."""

from __future__ import annotations

from functools import cache

from patchkit.paths import RECIPES
from patchkit.records import read_toml
from patchkit.runtime.files.content import FileContent


@cache
def _images() -> frozenset[str]:
    table = read_toml(dict[str, dict[str, tuple[str, ...]]], RECIPES / "env" / "images.toml")
    return frozenset(table["vllm"]["upstream"])


def is_upstream_image(image: str) -> bool:
    """Return whether upstream publishes an image, given with or without its tag."""
    repository = image.partition("@")[0]
    head, _, last = repository.rpartition("/")
    name = last.partition(":")[0]
    return f"{head}/{name}".removeprefix("docker.io/") in _images()


def is_upstream(content: FileContent, block: int = 0) -> bool:
    """Return whether what runs in a block is upstream's vLLM; not if the file does not say it."""
    images = {each.image for each in content.commands if each.block == block and each.image}
    images = images or {each.text for each in content.images}
    if images:
        return all(map(is_upstream_image, images))
    return any(each.project == "vllm" for each in content.versions)
