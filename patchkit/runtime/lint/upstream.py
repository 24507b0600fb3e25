"""Tell whose vLLM a file runs, as far as it says."""

from __future__ import annotations

from functools import cache

from patchkit.paths import RECIPES
from patchkit.records import read_toml
from patchkit.runtime.files.content import CommandLine, FileContent


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


class SoftwareOrigin:
    """Whose vLLM runs in each block of a file: its commands and images are gone through once."""

    def __init__(self, content: FileContent) -> None:
        self._commands: dict[int, list[CommandLine]] = {}
        for each in content.commands:
            self._commands.setdefault(each.block, []).append(each)
        images = {each.text for each in content.images}
        self._whole = all(map(is_upstream_image, images)) if images else None
        self._pinned = any(each.project == "vllm" for each in content.versions)

    def commands(self, block: int) -> list[CommandLine]:
        """Return what runs in a block, in the order of the file."""
        return self._commands.get(block, [])

    def is_upstream(self, block: int = 0) -> bool:
        """Return whether upstream's own vLLM runs in a block; not if the file does not say it."""
        images = {each.image for each in self.commands(block) if each.image}
        if images:
            return all(map(is_upstream_image, images))
        return self._pinned if self._whole is None else self._whole

    @property
    def is_fork(self) -> bool:
        """Return whether the file names images that upstream does not publish."""
        return self._whole is False
