"""Read how models are served: flags of vLLM, rules about them, upstream's recipes, presets.

From 0.33.0 on, vLLM ships recipes for models; ``vllm_recipes.tsv`` holds what they say. The name of
a row is ``MODEL``, whose value is the oldest vLLM that upstream names for it; or ``MODEL`` and a
key: ``MODEL vram_minimum_gb``, ``MODEL drafter``. A model with a recipe for a GB10 also has rows
with the keys ``file``, ``architecture``, ``precision``, and one for each flag and variable.

``presets.toml`` adds to the recipes, or differs from them; ``broken.toml`` has the releases that do
not serve some models. The heads of both files describe them. `serve-args`, `up` and `doctor --log`
use the second one.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated

from patchkit.errors import UsageError
from patchkit.finding import Confidence, Established
from patchkit.frozen import Values, frozen
from patchkit.records import RECIPES, one_of, read_toml
from patchkit.runtime.rules.releases import check_range, read_table, within
from patchkit.runtime.rules.rule import (
    CHOICES,
    Advice,
    Discouraged,
    FlagName,
    Grounded,
    Names,
    Rule,
    Situation,
    select_entries,
)
from patchkit.runtime.rules.spelling import is_slip
from patchkit.runtime.rules.variable_values import ONE, AllowedValues
from patchkit.runtime.rules.vllm_names import read_flags
from patchkit.units import GIB_PER_GB

_SHORTEST = 3  # characters from which on the beginning of a name gets suggestions
_MOST = 3  # names to suggest
PLACE = RECIPES / "env" / "presets.toml"
BROKEN = RECIPES / "env" / "broken.toml"
MODELS = RECIPES / "env" / "vllm_recipes.tsv"
VRAM = "vram_minimum_gb"
ABOUT = ("file", "architecture", "precision")
DRAFTING = "--speculative-config"
# vram_minimum_gb of recipes (in 10^9 bytes) is 1.0 to 1.5 times the weights, for checkpoints whose
# size is known. Dividing by the largest factor never overestimates the weights.
_ALLOWANCE = 1.5

FLAGS = RECIPES / "env" / "vllm_flags.tsv"
VALUES = RECIPES / "env" / "flag_values.toml"
RULES = RECIPES / "env" / "flags.toml"
_LEVELS = ("--optimization-level", "-O")


@frozen
class Preset:
    """A model and how it is served; the head of presets.toml describes the fields.

    A flag with the value False is never set, not even by a rule. ``differs`` maps a pattern of
    settings to the reason why the preset differs from upstream's recipe there. ``drafter`` is a
    value of --speculative-config that is only set if the user asks for it.
    """

    id: str
    quantization: Annotated[str, one_of(*CHOICES["quantization"], "")] = ""
    family: Annotated[str, one_of(*CHOICES["family"], "")] = ""
    moe: bool = False
    single: bool = True
    nodes: int = 1
    min_vllm: str = ""
    source: str
    evidence: Established
    confidence: Confidence
    weights_gib: float | None = None
    reads_gb: float | None = None
    flags: Mapping[FlagName, str | bool] = field(default_factory=dict)
    variables: Values = field(default_factory=dict)
    drafter: str = ""
    build: str = ""
    needs_token: bool = False
    instead: str = ""
    note: str = ""
    differs: Values = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the id without the owner. It names the preset unless another one has it, too."""
        return self.id.rpartition("/")[2]

    @property
    def settings(self) -> Values:
        """Return flag or variable → value for all that the preset sets; "" for a bare flag."""
        settings = {}
        for name, value in self.flags.items():
            if value is not False:
                settings[name] = "" if value is True else str(value)

        return {**settings, **self.variables}

    def reason(self, name: str, value: str | None) -> str:
        """Return why a setting differs from upstream's recipe, "" if no reason is known."""
        reasons = {**self.differs, **load_flag_rules().recipe}
        for pattern, reason in reasons.items():
            if fnmatchcase(name, pattern) or fnmatchcase(f"{name} {value}", pattern):
                return reason

        return ""


@frozen
class ModelRecipe:
    """Upstream's recipe for a checkpoint.

    ``settings`` are the flags and variables for a GB10, empty if the recipe has none.
    ``weights_gib`` is a lower bound of the size of its weights. ``about`` has the recipe's values
    for the names in ABOUT.
    """

    id: str
    min_vllm: str
    weights_gib: float | None
    drafter: str
    about: Values
    settings: Values


@cache
def model_recipes(release: str = "") -> Mapping[str, ModelRecipe]:
    """Return id in lower case → recipe for a release; for "", the newest one that is known."""
    settings_by_model: dict[str, dict[str, str]] = {}
    table = read_table(MODELS)
    for name, value in table.at(release or table.newest).items():
        model, _blank, setting = name.partition(" ")
        settings_by_model.setdefault(model, {})[setting] = value

    recipes = {}
    for model, settings in settings_by_model.items():
        vram = settings.pop(VRAM, "")
        # What the pops below take out is no setting; the rest are the settings.
        recipes[model.lower()] = ModelRecipe(
            id=model,
            min_vllm=settings.pop(""),
            weights_gib=float(vram) / _ALLOWANCE * GIB_PER_GB if vram else None,
            drafter=settings.pop("drafter", ""),
            about={name: settings.pop(name) for name in ABOUT if name in settings},
            settings=settings,
        )

    return recipes


def find_recipe(model: str) -> ModelRecipe | None:
    """Return upstream's recipe for OWNER/NAME, None if there is none."""
    return model_recipes().get(model.lower())


def read_presets() -> tuple[Preset, ...]:
    """Return the presets of presets.toml. Raises UsageError, with file and line, if malformed."""
    return read_toml(tuple[Preset, ...], PLACE, key="preset")


@cache
def load_presets() -> tuple[Preset, ...]:
    """Return all presets: those of presets.toml, then one for each further recipe for a GB10.

    Presets of the file get the settings of upstream's recipes that they do not differ from.
    """
    presets = {preset.id.lower(): preset for preset in read_presets()}
    table = read_table(MODELS)

    for name, recipe in model_recipes().items():
        if recipe.settings and name not in presets:
            presets[name] = Preset(
                id=recipe.id,
                source=f"vLLM {table.newest} recipes/models/{recipe.about['file']}",
                evidence="documented",
                confidence="medium",
            )

    return tuple(map(_complete_preset, presets.values()))


def _complete_preset(preset: Preset) -> Preset:
    """Return a preset with what upstream's recipe adds to it.

    Values of the preset go first. Settings against which the preset gives a reason are not added.
    """
    recipe = find_recipe(preset.id)
    if recipe is None:
        return preset

    flags: dict[str, str | bool] = {}
    variables = {}
    for name, value in recipe.settings.items():
        if preset.reason(name, value):
            continue
        if name.startswith("-"):
            flags[name] = value or True
        else:
            variables[name] = value

    precision = recipe.about.get("precision", "")
    if precision not in CHOICES["quantization"]:
        precision = ""

    return replace(
        preset,
        quantization=preset.quantization or precision,
        moe=preset.moe or recipe.about.get("architecture") == "moe",
        min_vllm=preset.min_vllm or recipe.min_vllm,
        flags={**flags, **preset.flags},
        variables={**variables, **preset.variables},
        drafter=preset.drafter or recipe.drafter or recipe.settings.get(DRAFTING, ""),
    )


def same_value(left: str | None, right: str | None) -> bool:
    """Return whether two values of a flag mean the same: ``0.80`` and ``0.8``, JSON in any spacing.

    Upper and lower case do not matter. None equals only None.
    """
    if left is None or right is None:
        return left is right

    try:
        return bool(json.loads(left.lower()) == json.loads(right.lower()))
    except ValueError:
        return left.lower() == right.lower()


def find_preset(model: str) -> Preset | None:
    """Return the preset for OWNER/NAME, NAME or a folder called NAME; case does not matter.

    Return None if there is none, or if several presets have the name.
    """
    path = model.rstrip("/").lower()
    owner, _sign, name = path.rpartition("/")

    # A folder called NAME may be a copy of the preset's checkpoint. Another owner's NAME is not.
    is_folder = "/" in owner or owner in ("", ".", "..", "~")
    namesakes = []

    for preset in load_presets():
        if path == preset.id.lower():
            return preset

        may_be_copied = is_folder or "/" not in preset.id
        if may_be_copied and name == preset.name.lower():
            namesakes.append(preset)

    return namesakes[0] if len(namesakes) == 1 else None


def named_preset(name: str) -> Preset:
    """Return the preset for a name that the user gives. Raises UsageError if there is none."""
    if preset := find_preset(name):
        return preset

    hint = (
        "`patchkit serve-args --list` shows them; for another model give --quantization"
    )

    if similar := suggest_presets(name):
        hint = f"did you mean {' or '.join(similar)}?"

    raise UsageError(f"no preset is called {name}", hint=hint)


def suggest_presets(name: str) -> list[str]:
    """Return the presets that the user may mean by a name, for a hint.

    The first of these that finds any counts: presets of that name, whose owner the user left out;
    presets whose name is one slip away; presets whose name begins with the given one.
    """
    lower_name = name.lower()
    presets = load_presets()

    namesakes = [row.id for row in presets if row.name.lower() == lower_name]
    if namesakes:
        return namesakes

    has_owner = "/" in name
    names = [preset.id if has_owner else preset.name for preset in presets]
    slips = [row for row in names if is_slip(name, row)]

    # With an owner, a longer name would be another checkpoint, so only slips count.
    if slips or has_owner or len(name) < _SHORTEST:
        return slips

    longer_names = [row for row in names if row.lower().startswith(lower_name)]
    return longer_names[:_MOST]


@frozen
class Broken(Grounded):
    """A fault of some releases with some models, its cause and its cure.

    ``models`` are patterns of model names in lower case, with or without the owner.
    ``architectures`` are patterns of classes in a checkpoint's config. ``installed`` maps the
    packages that take part in the fault to ranges of versions. ``command`` applies the cure.
    """

    models: Names
    architectures: Names = ()
    installed: Mapping[str, Annotated[str, check_range]] = field(default_factory=dict)
    effect: str
    cause: str
    cure: str
    command: str = ""
    costs: str = ""

    def is_about(self, models: Iterable[str], architectures: Iterable[str]) -> bool:
        """Return whether the fault affects one of these model names or architectures."""
        full_names = [model.rstrip("/").lower() for model in models]
        short_names = [name.rpartition("/")[2] for name in full_names]

        pairs = (
            *product((*full_names, *short_names), self.models),
            *product(architectures, self.architectures),
        )
        return any(fnmatchcase(*pair) for pair in pairs)

    def is_possible(self, situation: Situation) -> bool:
        """Return whether every package whose version is known is in the range of the fault."""
        for name, bounds in self.installed.items():
            version = situation.get(name)
            if version and not within(version, bounds):
                return False

        return True


@cache
def load_broken() -> Mapping[str, Broken]:
    """Return all faults by id. Raises UsageError, with file and line, for a wrong entry."""
    faults = read_toml(tuple[Broken, ...], BROKEN, key="broken")
    return {fault.id: fault for fault in faults}


def broken_for(
    models: Iterable[str], architectures: Names, situation: Situation
) -> tuple[Broken, ...]:
    """Return the faults that may affect a model in a situation.

    ``models`` are the names that the model has, ``architectures`` its classes.
    """
    names = tuple(models)
    return tuple(
        fault
        for fault in select_entries(load_broken().values(), situation)
        if fault.is_about(names, architectures) and fault.is_possible(situation)
    )


@cache
def flags(version: str, home: Path | None = None) -> frozenset[str]:
    """Return the flags of a release; for "", those of all releases.

    With ``home``, return the flags of the vLLM in that folder.
    """
    return read_flags(home) if home else frozenset(read_table(FLAGS).at(version))


def has_flag(flag: str, version: str, home: Path | None = None) -> bool:
    """Return whether `vllm serve` takes a flag.

    The flag may have any spelling that vLLM takes: ``--max_model_len=8``,
    ``--no-enable-prefix-caching``, ``--compilation-config.mode``, ``-O3``.
    """
    known_flags = flags(version, home)
    name = re.split(r"[=.]", flag, maxsplit=1)[0]

    if name.startswith("-O"):  # vLLM expands -O3 before it parses flags
        return not known_flags.isdisjoint(_LEVELS)

    if name.startswith("--"):  # vLLM's parser takes _ for -
        name = name.replace("_", "-")

    # argparse makes --no-X of every switch --X (BooleanOptionalAction).
    switch = name.replace("--no-", "--", 1)
    return not known_flags.isdisjoint((name, switch))


@frozen
class Choices:
    """A flag that takes only some values.

    A value is NAME, or NAME RANGE if only some releases take it. They are from the first of
    ``files`` of vLLM that has ``symbol``. ``capitals`` says that upper and lower case differ.
    """

    flag: str
    files: Names
    symbol: str
    values: Names
    capitals: bool = True

    def allowed_by(self, version: str) -> AllowedValues:
        """Return the values that a release takes; for "", those of all releases."""
        names = []

        for value in self.values:
            name, _blank, bounds = value.partition(" ")
            if not version or within(version, bounds):
                names.append(name)

        return AllowedValues(how=ONE, words=tuple(names), any_case=not self.capitals)


@cache
def load_choices() -> Mapping[str, Choices]:
    """Return flag → its choices. Raises UsageError, with file and line, if malformed."""
    rows = read_toml(tuple[Choices, ...], VALUES, key="flag")
    return {row.flag: row for row in rows}


@frozen
class FlagRule(Rule):
    """A rule that sets a flag; ``value`` is "" for a bare flag.

    ``planned`` says that the value comes from a plan of the memory, and replaces the preset's.
    """

    flag: FlagName
    value: str = ""
    planned: bool = False


@frozen
class LeaveOut(Discouraged):
    """A flag that patchkit never sets, even if a preset or a user names it."""

    flag: FlagName

    def is_against(self, flag: str, value: str) -> bool:
        """Return whether this entry is about ``flag`` and its ``values`` match ``value``."""
        return flag == self.flag and self.matches(value)


@frozen
class DenseNames:
    """The names in vLLM of the dense layers of some architectures.

    ``files`` are the files of vLLM that give these layers a quantization config.
    """

    architectures: Names
    layers: Names
    files: Names


@frozen
class FlagRules:
    """The contents of flags.toml.

    ``preset`` maps a flag to the reason why presets set it. ``recipe`` maps a pattern of settings
    in upstream's recipes to the reason why presets leave them out.
    """

    rules: tuple[FlagRule, ...] = field(metadata={"key": "rule"})
    leave_out: tuple[LeaveOut, ...]
    advice: tuple[Advice, ...]
    dense: tuple[DenseNames, ...]
    dense_parts: Mapping[str, Names]
    preset: Mapping[FlagName, str]
    recipe: Values


@cache
def load_flag_rules() -> FlagRules:
    """Return the contents of flags.toml. Raises UsageError, with file and line, if malformed."""
    return read_toml(FlagRules, RULES)
