"""Tuned configs of the fused MoE kernel for the GB10, where a release looks for them."""

import io
import json
import posixpath
import re
import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from packaging.specifiers import SpecifierSet

from patchkit.frozen import frozen
from patchkit.recipes.vllm import kit

_HOME = Path(__file__).parents[1] / "moe_configs"
_INDEX = tomllib.loads((_HOME / "index.toml").read_text(encoding="utf-8"))
_DEVICE: str = _INDEX["device"]

_PATH = "vllm/model_executor/layers/fused_moe/fused_moe.py"
_FOLDER = "vllm/model_executor/layers/fused_moe/configs"
_SETUP = "setup.py"
_PACKAGED = "model_executor/layers/fused_moe/configs/*.json"
_TOLERANT = 'tuned_config.pop("triton_version"'
_KEY = r"E=(\d+),N=(\d+),device_name=\w+(?:,dtype=(\w+))?(?:,block_shape=\[(\d+),(\d+)\])?\.json"
# How each release names a file, so that a file here has the name that it looks for.
_NAMING = (
    "E={E},N={N},device_name={device_name}{dtype_selector}{block_shape_selector}.json"
)


@frozen
class Config:
    """An entry of ``index.toml``."""

    file: str
    upstream: str
    source: str
    claim: str
    established: kit.Established

    @property
    def key(self) -> list[int | str | None]:
        """experts, N, dtype, block shape: what a file is named after."""
        match = re.fullmatch(_KEY, self.file)
        assert match is not None
        experts, n, dtype, *block = match.groups()
        return [int(experts), int(n), dtype, *map(int, filter(None, block))]

    @property
    def path(self) -> str:
        return f"{_FOLDER}/{self.file}"

    @property
    def shipped(self) -> str:
        return (_HOME / self.file).read_text(encoding="utf-8")

    def text(self, tree: kit.SourceTree) -> str:
        """Return what to install; ``triton_version`` unless the release takes it for a row."""
        text = self.shipped
        if _TOLERANT in tree.read(_PATH):
            return text
        return json.dumps(_read_rows(text), indent=4) + "\n"


_CONFIGS = [Config(**entry) for entry in _INDEX["config"]]


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Look which of the files are there, and whether the release names them so."""
    if _NAMING not in tree.read(_PATH):
        raise kit.altered(f"{_PATH}: get_config_file_name gives other names to files")

    edits: kit.Edits = []
    theirs = 0
    for config in _CONFIGS:
        path = config.path
        releases = SpecifierSet(config.upstream, prereleases=True)
        is_upstreams = tree.version in releases and path not in tree.overlay
        if is_upstreams and tree.exists(path):
            theirs += 1
            continue
        text = config.text(tree)
        edits += kit.new_file(path, tree.find(path), text, note=config.claim)

    if theirs == len(_CONFIGS):
        return kit.upstream(f"{_FOLDER}: upstream has all {theirs} GB10 configs")
    more = f" ({theirs} of them upstream's)" if theirs else ""
    return kit.found(
        edits,
        now=f"{_FOLDER}: {len(edits)} GB10 configs are missing",
        done=f"{_FOLDER}: {len(_CONFIGS)} GB10 configs{more}",
    )


def prove(case: kit.Case) -> str:
    """Check that the release finds each file, and other devices get theirs."""
    tree = case.patched
    others = _INDEX["others"]
    questions = [partial(_rows_found, tree, _DEVICE)]
    for device in others:
        questions.append(partial(_rows_found, case.stock, device))
        questions.append(partial(_rows_found, tree, device))
    ours, *theirs = kit.ask(case.stock, questions, dict[str, object])

    for config in _CONFIGS:
        path = config.path
        answer = ours.get(path)
        if answer != _json_pairs(_read_rows(tree.read(path))):
            raise kit.ProofError(
                f"{path}: get_moe_configs gives {answer!r:.200}, not the rows of this file"
            )
        _require_packaged(tree, path)

    for device, before, after in zip(others, theirs[::2], theirs[1::2], strict=True):
        if before != after:
            raise kit.ProofError(f"{_PATH}: {device} gets another config than before")
    return (
        f"get_moe_configs finds {len(_CONFIGS)} configs for {_DEVICE}, and for "
        f"{', '.join(others)} what it found before"
    )


def _require_packaged(tree: kit.SourceTree, path: str) -> None:
    is_listed = tree.kind == "installed" or f'"{_PACKAGED}"' in tree.read(_SETUP)
    if not (is_listed and fnmatchcase(path, f"vllm/{_PACKAGED}")):
        raise kit.ProofError(
            f"{path}: setup.py does not package it, so a wheel would lack it"
        )


def _read_rows(text: str) -> dict[int, dict[str, int]]:
    """Return the rows of a file by number of tokens, without ``triton_version``."""
    return {int(key): row for key, row in json.loads(text).items() if key.isdecimal()}


def _json_pairs(rows: Mapping[int, object]) -> list[list[object]]:
    """Return rows as JSON can have them, also with a number as a key."""
    return [[size, rows[size]] for size in sorted(rows, key=str)]


# Within `ask`


def _rows_found(tree: kit.SourceTree, device: str) -> dict[str, object]:
    """Return path → the rows that the release finds for a config, on a device of that name."""
    path = SimpleNamespace(
        join=posixpath.join, dirname=posixpath.dirname, realpath=str, exists=tree.exists
    )
    stand_ins = {
        "__file__": _PATH,
        "current_platform": SimpleNamespace(get_device_name=lambda *_arguments: device),
        "envs": SimpleNamespace(
            VLLM_TUNED_CONFIG_FOLDER=None, VLLM_BATCH_INVARIANT=False
        ),
        "logger": kit.Anything(),
        "open": lambda place: io.StringIO(tree.read(place)),
        "os": SimpleNamespace(path=path),
        "re": re,  # upstream imports the package regex by this name
        "vllm_is_batch_invariant": lambda: False,
    }
    find = kit.Code(tree, stand_ins).get(_PATH, "get_moe_configs")
    rows = {config.path: find(*config.key) for config in _CONFIGS}
    return {place: found and _json_pairs(found) for place, found in rows.items()}


_EXAMPLE = next(config for config in _CONFIGS if "N=704" in config.file)

FIX = kit.Fix(
    title="Tuned MoE kernel configs for the GB10",
    symptom='"Using default MoE config. Performance might be sub-optimal!" on a GB10.',
    why="vLLM looks for a file that is named after experts, size, device, dtype and block shape, "
    "and ships none for NVIDIA_GB10 before 0.28.0, two from then on. The ones collected here "
    "go where the release looks; a file of upstream's is left alone. They are optional "
    "because nobody has shown that they help: one report of +65.7 % stands alone against +3.5 "
    "% in the kernel and no difference when served, two were tuned for SGLang's form of the "
    "kernel, and a tuned file stays as it is while upstream's defaults get better. Without a "
    "block shape in its name a file is never read for block-FP8 checkpoints: that reported "
    "one (E=512,N=512, no block shape) serves FP8 with scales per tensor or channel alone. "
    "VLLM_TUNED_CONFIG_FOLDER names a folder of your own, which is searched first.",
    needs=(
        kit.optional(
            ">=0.11.1",
            "the kernel runs without them, on upstream's defaults",
            target="gb10",
        ),
    ),
    upstream="0.28.0 ships two of them; for the others, never up to 0.33.0",
    evidence=tuple(
        kit.Evidence(f"{c.file}: {c.claim}", c.source, c.established) for c in _CONFIGS
    ),
    look=look,
    prove=prove,
    examples=(
        kit.Example(
            "0.25.1",
            _EXAMPLE.path,
            None,
            _EXAMPLE.shipped,
            beside={
                _PATH: f'NAMING = f"{_NAMING}"\n{_TOLERANT})\n',
                **{c.path: c.shipped for c in _CONFIGS if c is not _EXAMPLE},
            },
        ),
    ),
)
