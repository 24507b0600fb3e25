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
_KEY = re.compile(
    r"E=(\d+),N=(\d+),device_name=\w+(?:,dtype=(\w+))?(?:,block_shape=\[(\d+),(\d+)\])?\.json"
)
_NAME = re.compile(r"[\w=][\w=,.\[\]-]{,200}", re.ASCII)

Key = tuple[int, int, str | None, tuple[int, ...]]


@frozen
class Config:
    """An entry of ``index.toml``."""

    file: str
    upstream: str
    source: str
    claim: str
    established: kit.Established

    @property
    def key(self) -> Key:
        """experts, N, dtype, block shape: what a file is named after."""
        match = _KEY.fullmatch(self.file)
        assert match is not None
        experts, n, dtype, *block = match.groups()
        return int(experts), int(n), dtype, tuple(map(int, block)) if block[0] else ()

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
    """Look which of the files are there, by the names that the release itself makes of the keys."""
    edits: kit.Edits = []
    theirs = 0
    for config, path in zip(_CONFIGS, _config_paths(tree), strict=True):
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
    ours, *theirs = kit.ask(case.stock, questions, list[object])

    paths = _config_paths(tree)
    for path, answer in zip(paths, _require_each(ours), strict=True):
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


def _config_paths(tree: kit.SourceTree) -> list[str]:
    """Return the place of each config, by the name that the release makes of its key.

    Raises DriftError.
    """
    try:
        (found,) = kit.ask(tree, [partial(_names_found, tree)], list[object])
    except kit.ProofError as error:
        raise kit.altered(
            f"{_PATH}: get_config_file_name cannot be run as it was known: {error.what}"
        ) from None
    named = [
        name
        for name in _require_each(found)
        if isinstance(name, str) and _NAME.fullmatch(name)
    ]
    if len(set(named)) < len(_CONFIGS):
        raise kit.altered(
            f"{_PATH}: get_config_file_name does not give {len(_CONFIGS)} names of files"
        )
    return [f"{_FOLDER}/{name}" for name in named]


def _require_each(answer: list[object]) -> list[object]:
    """Return an answer that has something for each config. Raises ProofError."""
    if len(answer) != len(_CONFIGS):
        raise kit.ProofError(
            f"{_PATH}: answers for {len(_CONFIGS)} configs with {answer!r:.200}"
        )
    return answer


# Within `ask`


def _rows_found(tree: kit.SourceTree, device: str) -> list[object]:
    """Return the rows that the release finds for each config, on a device of that name."""
    path = SimpleNamespace(
        join=posixpath.join, dirname=posixpath.dirname, realpath=str, exists=tree.exists
    )
    code = _code_on(
        tree,
        device,
        __file__=_PATH,
        envs=SimpleNamespace(VLLM_TUNED_CONFIG_FOLDER=None, VLLM_BATCH_INVARIANT=False),
        open=lambda place: io.StringIO(tree.read(place)),
        os=SimpleNamespace(path=path),
        vllm_is_batch_invariant=lambda: False,
    )
    find = code.get(_PATH, "get_moe_configs")
    found = (find(*config.key[:3], *config.key[3]) for config in _CONFIGS)
    return [_json_pairs(rows) if isinstance(rows, dict) else rows for rows in found]


def _names_found(tree: kit.SourceTree) -> list[object]:
    """Return the name of a file that the release makes of the key of each config."""
    build = _code_on(tree, _DEVICE).get(_PATH, "get_config_file_name")
    return [build(*config.key[:3], list(config.key[3]) or None) for config in _CONFIGS]


def _code_on(tree: kit.SourceTree, device: str, **names: object) -> kit.Code:
    """Return the release's code, as it runs on a device of that name."""
    platform = SimpleNamespace(get_device_name=lambda *_arguments: device)
    stand_ins = {
        "current_platform": platform,
        "logger": kit.Anything(),
        "re": re,  # upstream imports the package regex by this name
    }
    code = kit.Code(tree, stand_ins)
    for name, value in names.items():
        code.put(_PATH, name, value)
    return code


_EXAMPLE = next(config for config in _CONFIGS if "N=704" in config.file)
_NAMING = """\
def get_config_file_name(E, N, dtype, block_shape=None):
    device = current_platform.get_device_name().replace(" ", "_")
    dtype = f",dtype={dtype}" if dtype else ""
    block = f",block_shape={block_shape}".replace(" ", "") if block_shape else ""
    return f"E={E},N={N},device_name={device}{dtype}{block}.json"


def get_moe_configs(tuned_config):
    tuned_config.pop("triton_version", None)
"""


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
            f"{_FOLDER}/{_EXAMPLE.file}",
            None,
            _EXAMPLE.shipped,
            beside={
                _PATH: _NAMING,
                **{
                    f"{_FOLDER}/{c.file}": c.shipped
                    for c in _CONFIGS
                    if c is not _EXAMPLE
                },
            },
        ),
    ),
)
