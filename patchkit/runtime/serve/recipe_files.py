"""Read recipes that others write: vLLM's own, and the YAML of eugr and sparkrun.

A recipe of eugr or sparkrun has a command with ``{names}``, which ``defaults`` fill in. A file is
hostile until it is read: nothing of it runs, and what a preset cannot say is named.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from patchkit.errors import SourceError, UsageError
from patchkit.reading import read_text
from patchkit.records import read_json
from patchkit.runtime.rules.presets import DRAFTING, Preset, split_settings
from patchkit.runtime.rules.rule import CHOICES, Values
from patchkit.runtime.rules.secret_texts import find_code_risk
from patchkit.runtime.serve.vllm_recipe import (
    OF_THE_PLACE,
    Part,
    Settings,
    gb10_settings,
    merge_settings,
    split_flags,
    variant_settings,
)
from patchkit.yaml_text import YamlError, read_value

_HINT = "name a recipe: YAML of vLLM, eugr or sparkrun"
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
_SHORT_FLAG = re.compile(r"^-([A-Za-z]+)")
_LONG_NAMES = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "cc": "compilation-config",
}
_SHELL = re.compile(r"[;&|<>]+|.*(\$\(|`).*")
# Keys of eugr's and sparkrun's recipes that are read, or that say nothing of flags.
_KNOWN_KEYS = re.compile(
    "model|defaults|env|command|runtime|min_nodes|cluster_only|name|description|metadata"
    "|recipe_version|max_nodes|solo_only|mode|maintainer|benchmark"
)


def read_recipe(path: Path, model: str = "") -> tuple[Preset, list[str]]:
    """Return the preset in a recipe file, and a line for each thing that it leaves out.

    ``model`` selects one of several models. Raises UsageError if the file does not have it,
    SourceError if the file is no recipe.
    """
    text = read_text(path, limit=_LARGEST, hint=_HINT)
    try:
        recipe = read_value(text)
        if isinstance(recipe.get("model"), dict):
            preset, untold = _from_vllm(recipe, model, str(path))
        else:
            preset, untold = _from_command(recipe, model, str(path))
    except (YamlError, *_NO_RECIPE) as error:
        line = f":{error.line}" if isinstance(error, YamlError) else ""
        why = " ".join(str(error).split())[:200]
        raise SourceError(f"{path}{line}: is no recipe", why=why, hint=_HINT) from None

    variables = dict(preset.variables)
    for name in preset.variables:
        if reason := find_code_risk(name):
            del variables[name]
            untold.append(f"{name}: {reason}")
    return replace(preset, variables=variables), untold


def _from_vllm(recipe: Part, model: str, source: str) -> tuple[Preset, list[str]]:
    variants = recipe["variants"]
    models = {
        name: str(variant.get("model_id") or recipe["model"]["model_id"])
        for name, variant in variants.items()
    }
    tuned = gb10_settings(recipe)

    names = [
        row for row in (*tuned, *models) if model.lower() in ("", models[row].lower())
    ]
    if not names:
        raise UsageError(
            f"{source}: has no {model}", hint=f"it has {', '.join(models.values())}"
        )

    name = names[0]
    facts = {**recipe["model"], **variants[name]}
    precision = str(facts.get("precision"))
    oldest = str(facts.get("min_vllm_version"))

    preset = _preset(
        models[name],
        tuned.get(name) or variant_settings(recipe, variants[name]),
        source,
        quantization=precision if precision in CHOICES["quantization"] else "",
        moe=facts.get("architecture") == "moe",
        min_vllm=oldest if oldest[:1].isdigit() else "",
    )

    untold = [] if tuned else ["it names no GB10: these are its flags for any GPU"]
    return preset, untold


def _from_command(recipe: Part, model: str, source: str) -> tuple[Preset, list[str]]:
    """Return the preset of eugr's or sparkrun's recipe; without a command defaults are flags."""
    if not str(recipe.get("runtime", "vllm")).startswith(("vllm", "eugr-vllm")):
        raise ValueError(f"it is for {recipe['runtime']}, not for vLLM")

    defaults = _texts(recipe.get("defaults") or {})
    named_model = str(recipe.get("model", model))
    command = str(recipe.get("command") or _command_of(defaults))
    filled_in = _fill_in(command, {**defaults, "model": named_model})

    # As a shell does, with signs such as ; and | as words.
    reader = shlex.shlex(filled_in, posix=True, punctuation_chars=";&|<>")
    reader.whitespace_split = True
    words = [*reader]

    behind = words[words.index("serve") + 1 :]
    served = [*takewhile(lambda word: not _SHELL.fullmatch(word), behind)]
    is_all_served = words == ["vllm", "serve", *served]
    if served and not served[0].startswith("-"):
        named_model = served.pop(0)

    flags = dict(split_flags([_SHORT_FLAG.sub(_long_name, word) for word in served]))
    nodes = int(recipe.get("min_nodes") or 1 + bool(recipe.get("cluster_only")))

    preset = _preset(
        model or named_model,
        merge_settings(flags.items()) | _texts(recipe.get("env") or {}),
        source,
        nodes=nodes,
        single=nodes == 1,
    )
    return preset, [*_find_untold(recipe, is_all_served, flags)]


def _find_untold(
    recipe: Part,
    is_all_served: bool,
    flags: Iterable[str],
) -> Iterator[str]:
    """Yield a line for each thing in the recipe that the preset leaves out."""
    for key in recipe:
        if not _KNOWN_KEYS.fullmatch(str(key)):
            yield f"{key} is not translated"
    if not is_all_served:
        yield "of its command, what is not `vllm serve` and its flags is not translated"

    names = [name for name in flags if OF_THE_PLACE.fullmatch(name)]
    if names:
        yield f"{', '.join(names)}: of the place, which serve-args knows"


def _texts(table: Mapping[str, Any]) -> dict[str, str]:
    """Return values as a command has them: a table as JSON."""
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in table.items()
    }


def _command_of(defaults: Values) -> str:
    """Return the command that sparkrun makes if a recipe has only defaults."""
    words = []

    for name, value in defaults.items():
        if value != "false":
            words.append(f"--{name.replace('_', '-')}")
        if value not in ("true", "false"):
            words.append(value)
    return f"vllm serve {{model}} {shlex.join(words)}"


def _fill_in(command: str, values: Values) -> str:
    """Put values in the place of ``{names}``; doubled braces are eugr's way to write braces."""
    has_doubled = "{{" in command
    for _ in range(3):  # a default may name another one
        names = _PLACEHOLDER.findall(command)
        if len(command) + sum(len(values.get(name, "")) for name in names) > _LARGEST:
            raise ValueError("its command is too long")
        command = _PLACEHOLDER.sub(
            lambda match: values.get(match[1], match[0]), command
        )

    command = command.replace("\\\n", " ")
    if has_doubled:
        command = command.replace("{{", "{").replace("}}", "}")
    return command


def _long_name(flag: re.Match[str]) -> str:
    return f"--{_LONG_NAMES.get(flag[1], flag[1])}"


def _preset(model: str, settings: Settings, source: str, **facts: Any) -> Preset:
    # Raise here, not later, if one of these values is malformed.
    float(settings.get("--gpu-memory-utilization", 0))
    read_json(dict[str, Any], settings.get(DRAFTING, "{}"))

    flags, variables = split_settings(settings)
    return Preset(
        id=model,
        # A recipe without it leaves the kernel of the experts to vLLM.
        flags={"--moe-backend": False, **flags},
        variables=variables,
        source=source,
        evidence="reported",
        confidence="medium",
        **facts,
    )
