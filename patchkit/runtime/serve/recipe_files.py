"""Read recipes that others write, vLLM's own, eugr's and sparkrun's YAML, and write vLLM's.

vLLM's (``schema_version: 1``) has flags and variables by checkpoint, feature and hardware. eugr's
and sparkrun's have a command with ``{names}``, which ``defaults`` fill in. A file is hostile until
it is read: nothing of it runs, and what a preset cannot say is named.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from patchkit.errors import SourceError, UsageError
from patchkit.reading import read_text
from patchkit.records import read_json
from patchkit.runtime.rules.presets import DRAFTING, Preset
from patchkit.runtime.rules.rule import CHOICES
from patchkit.runtime.rules.secret_texts import runs_code
from patchkit.runtime.serve.args import ServeCommand
from patchkit.units import GIB_PER_GB
from patchkit.yaml_text import YamlError, read_value

GB10 = "dgx_spark_gb10"
# As upstream's command builder: the most exact one wins.
_HARDWARE = (GB10, "blackwell", "nvidia")
# Optional in every recipe, and what makes a single user's answers quick: taken all the same.
_DRAFTING = "spec_decoding"
_SPARK = re.compile(r"DGX Spark|GB10")
# What belongs to a place and not to the model.
_OF_THE_PLACE = re.compile(
    r"--(host|port|(tensor|pipeline)-parallel(-size)?|nnodes|node-rank|master-(addr|port)"
    r"|headless|distributed-executor-backend|served-model-name)|NCCL_\w+"
)
Settings = dict[str, str]
_NO_RECIPE = (
    AttributeError,
    ArithmeticError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_LARGEST = 1 << 18  # bytes of a file, characters of its command
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_SHORT = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "cc": "compilation-config",
}
_SHELL = re.compile(r"[;&|<>]+|.*(\$\(|`).*")
# Keys of eugr's and sparkrun's recipes that are read, or that say nothing of flags.
_READ = {"model", "defaults", "env", "command", "runtime", "min_nodes", "cluster_only"}
_READ |= {
    "name",
    "description",
    "metadata",
    "recipe_version",
    "max_nodes",
    "solo_only",
    "mode",
}
_READ |= {"maintainer", "benchmark"}


def read_recipe(path: Path, model: str = "") -> tuple[Preset, list[str]]:
    """Return what a file says of a model, "" for its own, and what no preset can say, by the line.

    Raises UsageError, SourceError.
    """
    hint = "name a recipe: YAML of vLLM, eugr or sparkrun"
    text = read_text(path, limit=_LARGEST, hint=hint)
    try:
        recipe = read_value(text)
        is_vllms = isinstance(recipe.get("model"), dict)
        made = _from_vllm if is_vllms else _from_command
        preset, untold = made(recipe, model, str(path))
    except (YamlError, *_NO_RECIPE) as error:
        place = f"{path}:{error.line}" if isinstance(error, YamlError) else str(path)
        why = " ".join(str(error).split())[:200]
        raise SourceError(f"{place}: is no recipe", why=why, hint=hint) from None
    taken = {
        name: value for name, value in preset.variables.items() if not runs_code(name)
    }
    untold += [
        f"{name}: {runs_code(name)}" for name in preset.variables if name not in taken
    ]
    return replace(preset, variables=taken), untold


def _from_vllm(
    recipe: Mapping[str, Any], model: str, source: str
) -> tuple[Preset, list[str]]:
    variants = {
        name: str(each.get("model_id") or recipe["model"]["model_id"])
        for name, each in recipe["variants"].items()
    }
    tuned = dict(recipe_settings(recipe))
    fits = [
        name
        for name in (*tuned, *variants)
        if model.lower() in ("", variants[name].lower())
    ]
    if not fits:
        raise UsageError(
            f"{source}: has no {model}", hint=f"it has {', '.join(variants.values())}"
        )
    variant = recipe["variants"][fits[0]]
    settings = tuned.get(fits[0]) or joined(_settings(recipe, variant))
    its = {**recipe["model"], **variant}
    precision, oldest = str(its.get("precision")), str(its.get("min_vllm_version"))
    preset = _preset(
        variants[fits[0]],
        settings,
        source,
        quantization=precision * (precision in CHOICES["quantization"]),
        moe=its.get("architecture") == "moe",
        min_vllm=oldest * oldest[:1].isdigit(),
    )
    return preset, [] if tuned else [
        "it names no GB10: these are its flags for any GPU"
    ]


def _from_command(
    recipe: Mapping[str, Any], model: str, source: str
) -> tuple[Preset, list[str]]:
    """Return what eugr's or sparkrun's recipe says; without a command its defaults are flags."""
    if not str(recipe.get("runtime", "vllm")).startswith(("vllm", "eugr-vllm")):
        raise ValueError(f"it is for {recipe['runtime']}, not for vLLM")
    untold = [f"{key} is not translated" for key in recipe if key not in _READ]
    defaults, env = (
        # As a command has them: a table as JSON.
        {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in (recipe.get(key) or {}).items()
        }
        for key in ("defaults", "env")
    )
    served = {"model": str(recipe.get("model", model))}
    words = []
    for (
        name,
        value,
    ) in defaults.items():  # as sparkrun makes flags where there is no command
        flag = f"--{name.replace('_', '-')}"
        words += (
            [] if value == "false" else [flag] if value == "true" else [flag, value]
        )
    command = str(recipe.get("command") or f"vllm serve {{model}} {shlex.join(words)}")
    facts, doubled = {**defaults, **served}, "{{" in command
    for _ in range(3):  # a default may name another one
        found = _PLACEHOLDER.findall(command)
        if len(command) + sum(len(facts.get(name, "")) for name in found) > _LARGEST:
            raise ValueError("its command is too long")
        command = _PLACEHOLDER.sub(lambda name: facts.get(name[1], name[0]), command)
    command = command.replace("\\\n", " ")
    if doubled:  # as eugr writes braces
        command = command.replace("{{", "{").replace("}}", "}")
    reader = shlex.shlex(command, posix=True, punctuation_chars=";&|<>")
    reader.whitespace_split = True
    words = [*reader]
    begin = words.index("serve") + 1
    given = [*takewhile(lambda word: not _SHELL.fullmatch(word), words[begin:])]
    if words[:begin] != ["vllm", "serve"] or len(given) != len(words) - begin:
        untold.append(
            "of its command, what is not `vllm serve` and its flags is not translated"
        )
    named = given.pop(0) if given and given[0][:1] != "-" else served["model"]
    long = (
        re.sub(r"^-([A-Za-z]+)", lambda it: f"--{_SHORT.get(it[1], it[1])}", w)
        for w in given
    )
    settings = dict(split_flags([*long]))
    if place := [name for name in settings if _OF_THE_PLACE.fullmatch(name)]:
        untold.append(f"{', '.join(place)}: of the place, which serve-args knows")
    settings = joined(settings.items()) | env
    nodes = int(recipe.get("min_nodes") or 1 + bool(recipe.get("cluster_only")))
    return _preset(
        model or named, settings, source, nodes=nodes, single=nodes == 1
    ), untold


def _preset(model: str, settings: Settings, source: str, **given: Any) -> Preset:
    # Both are taken apart by what chooses flags.
    float(settings.get("--gpu-memory-utilization", 0))
    read_json(dict[str, Any], settings.get(DRAFTING, "{}"))
    flags: dict[str, str | bool] = {
        n: v or True for n, v in settings.items() if n[0] == "-"
    }
    return Preset(
        id=model,
        # A recipe without it leaves the kernel of the experts to vLLM.
        flags={"--moe-backend": False, **flags},
        variables={
            name: value for name, value in settings.items() if name not in flags
        },
        source=source,
        evidence="reported",
        confidence="medium",
        **given,
    )


def recipe_settings(
    recipe: Mapping[str, Any], told: Mapping[str, Settings] | None = None
) -> Iterator[tuple[str, Settings]]:
    """Yield the variants of vLLM's recipe that are for a GB10, with flag or variable → value.

    ``told`` is what the guide's text says, by variant.
    """
    variants, found = recipe["variants"], dict(told or {})
    named = {
        name
        for name, each in variants.items()
        if GB10 in each.get("hardware_overrides", {})
        or GB10 in each.get("supported_hardware", ())
    }
    # A recipe that names the device and no variant means all of them.
    whole = not (named or told) and (
        GB10 in recipe["meta"].get("hardware", {})
        or _SPARK.search(recipe.get("guide", ""))
    )
    for name, variant in variants.items():
        if name in named or (whole and "supported_hardware" not in variant):
            yield name, joined(_settings(recipe, variant))
        elif name in found:
            yield name, found[name]


def _settings(
    recipe: Mapping[str, Any], variant: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield flags and variables in the order in which upstream's command builder joins them."""
    model, optional = recipe["model"], recipe.get("opt_in_features", [])
    modes = {
        name: mode_of(name, feature, variant)
        for name, feature in recipe.get("features", {}).items()
        if name == _DRAFTING or name not in optional
    }
    for part in (model, *modes.values(), variant, _on_gb10(variant)):
        yield from split_flags(
            part.get("base_args") or part.get("args") or part.get("extra_args", [])
        )
        yield from (
            part.get("base_env") or part.get("env") or part.get("extra_env", {})
        ).items()


def mode_of(
    name: str, feature: Mapping[str, Any], variant: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the part of a feature that counts for a variant on a GB10."""
    wanted = variant.get("default_modes", {}).get(name) or feature.get("default_mode")
    mode = feature.get("modes", {}).get(wanted, feature)
    return _on_gb10(mode) or mode


def _on_gb10(part: Mapping[str, Any]) -> Mapping[str, Any]:
    overrides = part.get("hardware_overrides", {})
    return next((overrides[name] for name in _HARDWARE if name in overrides), {})


def split_flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield flag → value, "" for a bare flag; ``--a_b=c`` is ``--a-b c``."""
    parts = [
        part
        for word in words
        for part in (word.split("=", 1) if word[:2] == "--" else [word])
    ]
    for word, after in pairwise([*parts, "--"]):
        if word.startswith("--"):
            head, dot, tail = word.partition(".")
            yield (
                head.replace("_", "-") + dot + tail,
                "" if after.startswith("--") else after,
            )


def joined(settings: Iterable[tuple[str, str]]) -> Settings:
    """Return the settings of a model: the last one of a name counts, ``--a.b c`` is JSON."""
    found: Settings = {}
    for name, value in settings:
        flag, _, key = name.partition(".")
        # $NAME is filled in by the guide's reader: of the place as well.
        if _OF_THE_PLACE.fullmatch(flag) or value.startswith("$"):
            continue
        if key:
            inner: object = value
            with suppress(ValueError):
                inner = json.loads(value)
            value = json.dumps({**json.loads(found.get(flag, "{}")), key: inner})
        found[flag] = value
    return found


_OF_WEIGHTS = 1.2  # upstream's own rule for vram_minimum_gb
_BY_HAND = ("parameter_count", "active_parameters", "context_length")


def recipe_yaml(served: ServeCommand) -> tuple[str, list[str]]:
    """Return vLLM's recipe of what is served, and the keys of it that patchkit does not know."""
    import yaml

    request, preset = served.request, served.request.node.preset
    owner, _, name = request.model.rpartition("/")
    words = [it.words for it in served.flags if not _OF_THE_PLACE.fullmatch(it.flag)]
    drafting = [word for each in words if each[0] == DRAFTING for word in each]
    on_spark = {
        "extra_args": [word for each in words if each[0] != DRAFTING for word in each],
        "extra_env": dict(preset.variables) if preset else {},
    }
    about: dict[str, Any] = {"description": f"{name} on a DGX Spark"}
    meta = {"title": name, "slug": name.lower(), "provider": owner, **about}
    meta |= {
        "date_added": date.today(),
        "date_updated": date.today(),
        "tasks": ["text"],
    }
    meta["hardware"] = {}  # only what somebody has run counts as verified
    model: dict[str, Any] = {
        "model_id": request.model,
        "min_vllm_version": (preset and preset.min_vllm) or request.node.vllm,
        "base_args": [],
    }
    variant: dict[str, Any] = {**about, "supported_hardware": [GB10]}
    variant["hardware_overrides"] = {GB10: on_spark}
    if preset and preset.quantization:
        variant["precision"] = preset.quantization
        model["architecture"] = "moe" if preset.moe else "dense"
    if request.weights and not request.weights.from_name:
        variant["vram_minimum_gb"] = math.ceil(
            request.weights.gib / GIB_PER_GB * _OF_WEIGHTS
        )
    recipe = {
        "meta": meta,
        "model": model,
        "features": {"spec_decoding": {"args": drafting}} if drafting else {},
        "variants": {"default": variant},
        "compatible_strategies": [
            "multi_node_tp" if request.node.nodes > 1 else "single_node_tp"
        ],
        "guide": f"Written by patchkit for vLLM {request.node.vllm}, and not run by it.",
    }
    missing = [
        f"model.{key}" for key in ("architecture", *_BY_HAND) if key not in model
    ]
    asked = ("precision", "vram_minimum_gb")
    missing += [f"variants.default.{key}" for key in asked if key not in variant]
    return yaml.safe_dump(
        recipe, sort_keys=False, allow_unicode=True, width=100
    ), missing
